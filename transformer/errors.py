"""The one exception for what a user can mend."""


class InputError(Exception):
    """A value, file or machine that does not allow the work asked for.

    The message is one line that states the value, the limit and what to change. The command line prints it and
    exits with code 2.
    """
