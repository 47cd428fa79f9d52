"""The SGLang plugin: compressed checkpoints in SGLang's own server.

SGLang calls :func:`dasc.sglang.plugin.register` through the entry point ``sglang.srt.plugins``. Without ``DASC_PLAN``
it does nothing. The only folder that imports sglang; ``config``, ``budget``, ``plans`` and ``served`` work without it.
"""
