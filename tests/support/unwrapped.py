"""unwrapped(): text of several lines as one line, for comparisons with what is printed."""


def unwrapped(text: object) -> str:
    return " ".join(str(text).split())
