"""The error for arguments that a caller can correct."""


class UsageError(ValueError):
    """An argument cannot be used; the message says what was given and what would work.

    It is raised for names, files, sizes, options, models and configs. The command line shows it in one line and exits
    with code 2. Every other exception that reaches the command line is a bug and shows its traceback. Functions that
    take tensors raise plain `ValueError` for a wrong shape, dtype or device: there the caller is a program, and its
    traceback is what its author needs.
    """
