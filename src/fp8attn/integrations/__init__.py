"""fp8attn inside other libraries. Each module imports its library, so the core imports these only when they are used."""
