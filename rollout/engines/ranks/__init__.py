"""What runs inside SGLang's ranks, by SGLang's own interpreter: this folder alone joins its import path."""
