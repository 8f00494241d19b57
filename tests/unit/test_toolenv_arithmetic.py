"""The calculator's parser: right values, and no way to make it work for long."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.toolenv.envs import arithmetic
from services.toolenv.envs.arithmetic import ExpressionError, evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3+14", "17"), (" 3 + 14 ", "17"), ("10-3-2", "5"), ("2+3*4", "14"), ("(2+3)*4", "20"), ("-3+5", "2"),
        ("--3", "3"), ("8/2/2", "2"), ("1/3", "0.333333333333"), ("-1/3", "-0.333333333333"), ("0.1+0.2", "0.3"),
        ("7", "7"), (".5*2", "1"), ("12-77", "-65"), ("1/1000000000000000", "0"),
    ],
)  # fmt: skip
def test_values(text, value):
    assert evaluate(text).text == value


@pytest.mark.parametrize(
    "text",
    [
        "", "  ", "+", "3+", "*3", "3 4", "(3", "3)", "()", "1..2", ".", "3+x", "2**8", "2^8", "1e9", "1_000",
        "\u0661+\u0661",        "__import__('os')", "3;4", "3\n+4", "1/0", "4/(2-2)", "0x10", "\x00",
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_bounds():
    for text in ["9" * 41, "1+" * 300 + "1", "(" * 40 + "1" + ")" * 40, "-" * 40 + "1", "1+" * 600 + "1"]:
        with pytest.raises(ExpressionError):
            evaluate(text)
    with pytest.raises(ExpressionError, match="number too large"):
        evaluate("*".join(["9" * 40] * 9))


def test_the_hardest_accepted_expression_is_quick():
    text = "/".join(["(" * 10 + "9999999" + ")" * 10] * 30)
    began = time.perf_counter()
    with pytest.raises(ExpressionError):
        evaluate(text + "/" + text)
    assert time.perf_counter() - began < 1.0


def test_operators_are_counted():
    assert evaluate("3+14-2").operators == 2
    assert evaluate("-3+5", 1).operators == 1, "a sign is no operation"
    with pytest.raises(ExpressionError, match=r"at most 1 operator$"):
        evaluate("3+14-2", 1)
    with pytest.raises(ExpressionError, match="at most 0 operators"):
        evaluate("3+14", 0)


leaf = st.integers(0, 999).map(str)
tree = st.recursive(
    leaf,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda p: f"({p[0]}{p[1]}{p[2]})"),
    max_leaves=12,
)


@given(tree)
def test_integers_are_as_python_computes_them(text):
    assert evaluate(text).text == str(eval(text))


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_decimals_are_rounded_at_the_last_place(numerator, denominator):
    given_text = evaluate(f"{numerator}/{denominator}").text
    assert abs(Fraction(given_text) - Fraction(numerator, denominator)) <= Fraction(1, 2 * 10**arithmetic.MAX_DECIMALS)


@given(st.text(alphabet="0123456789+-*/(). x", max_size=60))
def test_any_text_ends_in_a_value_or_an_expression_error(text):
    try:
        said = evaluate(text).text
    except ExpressionError as error:
        said = str(error)
    assert 0 < len(said) < 350
