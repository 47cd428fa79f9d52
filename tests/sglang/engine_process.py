"""Serves one script with SGLang's engine and writes what it answered.

Both files are JSON, of the forms that :mod:`tests.sglang.engines` describes. Run in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.engine import Engine

FLUSH_TIMEOUT_S = 10


class Script:
    """Plays the steps of a script on an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.names = 0

    async def play(self, steps: list[dict[str, Any]]) -> list[Any]:
        return [await self.play_step(step) for step in steps]

    async def play_step(self, step: dict[str, Any]) -> Any:
        if "conversations" in step:
            return await self.converse(step["conversations"], step["concurrency"])
        if "flush" in step:
            # an engine may refuse to flush while the last request is still being retired
            result = await self.engine.tokenizer_manager.flush_cache(timeout_s=FLUSH_TIMEOUT_S)
            assert result.success, "the cache was not flushed"
            return None
        # every rank writes a line to the log
        await self.engine.tokenizer_manager.get_internal_state()
        return None

    async def converse(self, conversations: list[list[dict[str, Any]]], concurrency: int) -> list[list[Any]]:
        """Each client takes the next conversation and plays its turns one after the other."""
        answers: list[list[Any]] = [[] for _ in conversations]
        untaken = iter(range(len(conversations)))

        async def client() -> None:
            for number in untaken:
                history: list[int] = []
                for turn in conversations[number]:
                    history = history + turn["tokens"]
                    answer = await self.ask(history, turn)
                    answers[number].append(answer)
                    history = history + answer["tokens"]

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return answers

    async def ask(self, prompt: list[int], turn: dict[str, Any]) -> dict[str, Any]:
        self.names += 1
        name = f"request-{self.names}"
        asked, first_token_s = time.perf_counter(), 0.0
        from_token = turn["prompt_logprobs_from"]
        stream = await self.engine.async_generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": turn["new_tokens"], "ignore_eos": True},
            return_logprob=turn["top_logprobs"] > 0,
            logprob_start_len=-1 if from_token is None else len(prompt) - len(turn["tokens"]) + from_token,
            top_logprobs_num=turn["top_logprobs"],
            stream=True,
            rid=name,
        )
        out: dict[str, Any] = {}
        aborted = False
        async for out in stream:
            first_token_s = first_token_s or time.perf_counter() - asked
            if turn["abort_after"] is not None and len(out["output_ids"]) >= turn["abort_after"] and not aborted:
                aborted = True
                self.engine.tokenizer_manager.abort_request(rid=name)
        info = out["meta_info"]
        return {
            "prompt_tokens": info["prompt_tokens"],
            "cached_tokens": info["cached_tokens"],
            "tokens": out["output_ids"],
            "finish": info["finish_reason"]["type"],
            # [(logprob, token, text)] of each generated token, likeliest first
            "top_logprobs": [[(t, p) for p, t, _ in place] for place in info.get("output_top_logprobs", [])],
            "prompt_logprobs": [p for p, *_ in info.get("input_token_logprobs", [])] if from_token is not None else [],
            "first_token_s": first_token_s,
        }


def main(source: Path, target: Path) -> None:
    script = json.loads(source.read_text())
    engine = Engine(**script["arguments"])
    try:
        answers = engine.loop.run_until_complete(Script(engine).play(script["steps"]))
    finally:
        engine.shutdown()
    target.write_text(json.dumps(answers))
