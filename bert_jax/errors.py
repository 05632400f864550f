"""How a command ends other than well: one line on stderr and an exit code, no traceback."""


class CommandError(Exception):
    """Ends a command with its message and `exit_code`."""

    exit_code = 1


class UserError(CommandError):
    """A mistake the user can mend: one line that says what is wrong, where, and what to do."""

    exit_code = 2


class TrainingError(CommandError):
    """Training cannot go on, for example because the loss is no longer a number."""

    exit_code = 1


class Interrupted(CommandError):
    """A signal asked the run to stop; it has saved, and the same command goes on (EX_TEMPFAIL)."""

    exit_code = 75


class HostLost(CommandError):
    """Not all processes of a run connected in time; the same command may (EX_UNAVAILABLE)."""

    exit_code = 69
