"""fp8attn in other libraries. Each module imports its library, so the rest of the package imports these modules only when they are used."""
