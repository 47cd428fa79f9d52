"""Quality under compressed checkpoints by the warm-up and replay protocol of appendix C.2."""
