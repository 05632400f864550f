"""The one kind of error that is the user's to mend."""


class UserError(Exception):
    """A mistake the user can mend: one line that says what is wrong, where, and what to do.

    Every command prints it without a traceback and exits with code 2.
    """
