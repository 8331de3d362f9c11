"""How a simulation says that a promise was broken."""


class Violation(AssertionError):
    """The product broke one of its promises."""


def require(holds: bool, what: str) -> None:
    """Where it is asked for every token or update, whoever asks raises: to put `what` together takes longer."""
    if not holds:
        raise Violation(what)
