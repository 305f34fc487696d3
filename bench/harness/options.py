"""Options of several questions."""


def add_numbers(parser, **options):
    """{name: (default, help)}"""
    for name, (default, help) in options.items():
        how = dict(type=type(default), default=default, metavar="N", help=f"{help}; default %(default)s")
        parser.add_argument(f"--{name.replace('_', '-')}", **how)


def numbers(text):
    """The type of a list: "1,2"."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def check_least(given, least, names):
    """Raises ValueError for an option with a value below `least`."""
    for name in names.split():
        if getattr(given, name) < least:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(given, name)}: must be at least {least}")
