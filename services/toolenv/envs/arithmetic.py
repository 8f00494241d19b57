"""Exact arithmetic on text that a model wrote: a small parser with bounds on everything, and no eval.

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := ("+" | "-") factor | number | "(" expression ")"

There is no power operator: it is the cheapest way to ask for an unbounded number. Values are fractions, so that
0.1 + 0.2 is 0.3 and the same text gives the same bytes on every machine.
"""

from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 1024
MAX_OPERATORS = 256
MAX_DEPTH = 32
MAX_DIGITS = 40
"""Digits of one number as written."""

MAX_BITS = 1024
"""Size of numerator and denominator of any value on the way: about 300 decimal digits."""

MAX_DECIMALS = 12


class ExpressionError(Exception):
    """The text is not an expression within the bounds; the message is short, lower case and meant for the model."""


@dataclass(frozen=True)
class Result:
    """A value as text, and how many binary operators it took."""

    text: str
    operators: int


def evaluate(text: str, max_operators: int = MAX_OPERATORS) -> Result:
    """The value of `text`; ExpressionError says what is wrong with it.

    Integers come out as such, other values as decimals rounded half to even at MAX_DECIMALS places.
    """
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"at most {MAX_CHARACTERS} characters")
    parser = _Parser(text, min(max_operators, MAX_OPERATORS))
    value = parser.expression(0)
    if parser.peek() is not None:
        raise ExpressionError(f"unexpected {parser.peek()!r} at {parser.position}")
    return Result(_format(value), parser.operators)


class _Parser:
    def __init__(self, text: str, max_operators: int) -> None:
        self._text = text
        self._max_operators = max_operators
        self.position = 0
        self.operators = 0

    def peek(self) -> str | None:
        while self.position < len(self._text) and self._text[self.position] == " ":
            self.position += 1
        return self._text[self.position] if self.position < len(self._text) else None

    def expression(self, depth: int) -> Fraction:
        value = self._term(depth)
        while (sign := self.peek()) in ("+", "-"):
            self._operator()
            term = self._term(depth)
            value = _bounded(value + term if sign == "+" else value - term)
        return value

    def _term(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while (sign := self.peek()) in ("*", "/"):
            self._operator()
            factor = self._factor(depth)
            if sign == "/" and factor == 0:
                raise ExpressionError("division by zero")
            value = _bounded(value * factor if sign == "*" else value / factor)
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth >= MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        character = self.peek()
        if character in ("+", "-"):
            self.position += 1
            value = self._factor(depth + 1)
            return -value if character == "-" else value
        if character == "(":
            self.position += 1
            value = self.expression(depth + 1)
            if self.peek() != ")":
                raise ExpressionError("missing )")
            self.position += 1
            return value
        return self._number(character)

    def _number(self, character: str | None) -> Fraction:
        start = self.position
        while self.position < len(self._text) and self._text[self.position] in "0123456789.":
            self.position += 1
        digits = self._text[start : self.position]
        if not digits:
            raise ExpressionError("number expected at the end" if character is None else f"unexpected {character!r}")
        if len(digits) > MAX_DIGITS:
            raise ExpressionError(f"a number has at most {MAX_DIGITS} digits")
        if digits.count(".") > 1 or digits == ".":
            raise ExpressionError(f"{digits!r} is not a number")
        return Fraction(digits)

    def _operator(self) -> None:
        self.position += 1
        self.operators += 1
        if self.operators > self._max_operators:
            plural = "" if self._max_operators == 1 else "s"
            raise ExpressionError(f"at most {self._max_operators} operator{plural}")


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise ExpressionError("number too large")
    return value


def _format(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**MAX_DECIMALS)
    whole, part = divmod(abs(scaled), 10**MAX_DECIMALS)
    text = f"{whole}.{part:0{MAX_DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text
