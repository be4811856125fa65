"""fp8attn inside other libraries. Each module imports its library; nothing else in fp8attn imports these."""
