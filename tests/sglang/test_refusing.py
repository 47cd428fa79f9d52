"""A scheduler that has to stop does so, whatever in it would not end, and nobody is left waiting for it."""

import subprocess
import sys

import pytest

from dasc.sglang.refusing import EXIT_STATUS
from tests.sglang.engines import ROOT

# a thread that never ends, a handler that never returns, and no SGLang to import
SCHEDULER = """
import atexit, os, sys, threading, time, types
atexit.register(time.sleep, 1000)
threading.Thread(target=time.sleep, args=(1000,)).start()
context = types.ModuleType("sglang.srt.runtime_context")
context.get_parallel = lambda: types.SimpleNamespace(num_dp_ranks=int(sys.argv[1]))
sys.modules |= {"sglang": types.ModuleType("sglang"), "sglang.srt": types.ModuleType("sglang.srt")}
sys.modules["sglang.srt.runtime_context"] = context
os.kill = lambda process, signal: print(process == os.getppid(), signal.name, flush=True)
from dasc.sglang.refusing import stop
try:
    stop("the plan is\\nof another model")
finally:
    time.sleep(1000)
"""


@pytest.mark.parametrize(("replicas", "told"), [(1, ""), (2, "True SIGQUIT\n")])
def test_a_scheduler_ends_at_once_with_one_line(replicas: int, told: str):
    asked = [sys.executable, "-c", SCHEDULER, str(replicas)]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (EXIT_STATUS, told)
    assert done.stderr.splitlines()[-1] == "dasc: the plan is of another model"
