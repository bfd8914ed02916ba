"""LoRA adapters: so far, only how a request names one."""
