"""Numbers as people and models write them: the value that is found is right, or there is none."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lenience.tasks.finding import answers
from lenience.tasks.numbers import value

AFTER = answers("number-after:####", None)
LAST = answers("last-number", None)


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("-$5", -5), ("−5", -5), ("- 5", -5), ("$-5", -5), ("−$1,234.50", Fraction(-2469, 2)),
        ("$29.00.", 29), ("US$1,200", 1200), ("\\$18", 18), ("18\\%", 18), ("-5 %", -5),
        ("1 000", 1000), ("1\u00a0000 km", 1000), ("10\u202f000\u202f000", 10**7),
        ("1'000", 1000), ("1’000", 1000), ("1_000", 1000), ("12,34,567", 1234567),
        ("1.234.567", 1234567), ("1.234,5", Fraction(2469, 2)), ("3,5 kg", Fraction(7, 2)),
        ("1,234", 1234), (".5", Fraction(1, 2)), ("5.", 5), ("18,", 18), ("(5)", 5), ("+7", 7),
        ("2 1/2", Fraction(5, 2)), ("½", Fraction(1, 2)), ("2½", Fraction(5, 2)), ("18/2", 9),
        ("\\frac{1}{2}", Fraction(1, 2)), ("\\dfrac12", Fraction(1, 2)),
        ("$-\\frac{3}{4}$", Fraction(-3, 4)), ("2\\frac{1}{2}", Fraction(5, 2)),
        ("10^6", 10**6), ("10^{6}", 10**6), ("10**3", 1000), ("10⁶", 10**6), ("1e6", 10**6),
        ("1.5 × 10^3", 1500), ("1.5 \\times 10^{-1}", Fraction(3, 20)), ("２５", 25), ("－５", -5),
        ("5 million dollars", 5 * 10**6), ("2 dozen", 24), ("x = -3", -3), ("7 - 5 = 2", 2),
        ("5 × 3 = 15 apples", 15), ("1{,}000", 1000), ("10\\,000", 10000), ("5!", 5), ("5th", 5),
    ],
)  # fmt: skip
def test_a_form_that_is_understood_has_its_value(text: str, worth: Fraction) -> None:
    found = AFTER.find(f"So it is.\n#### {text}")
    assert found is not None and value(found) == worth
    assert AFTER.same(found, str(worth)) is True
    assert AFTER.same(found, str(worth + 1)) is False


@pytest.mark.parametrize(
    "text",
    [
        "5k", "3:30", "7-5", "18-20", "5, 6", "3/4/2020", "1.2.3", "x5", "5 or 6", "5 to 10",
        "5 + 3", "5 - 3", "5 -3", "1 0000", "3/0", "\\sqrt{2}", "√2", "2π", "±5", "1 2/1",
        "18 dollars and 50 cents", "0x1F", "3:4", "5 10", "1e", "10^x", "--5", "1,23,4",
    ],
)  # fmt: skip
def test_a_form_that_is_not_understood_is_no_answer(text: str) -> None:
    assert AFTER.find(f"#### {text}") is None


SEPARATED = {
    "plain": lambda n: str(n),
    "commas": lambda n: f"{n:,}",
    "spaces": lambda n: f"{n:,}".replace(",", " "),
    "thin": lambda n: f"{n:,}".replace(",", "\u2009"),
    "apostrophes": lambda n: f"{n:,}".replace(",", "'"),
    "wide": lambda n: "".join(chr(0xFF10 + int(digit)) for digit in str(n)),
    "latex": lambda n: f"{n:,}".replace(",", "{,}"),
}
SIGNS = ["-", "−", "－", "- "]
AROUND = [
    "{}", "{}.", "${}", "€ {}", "{} €", "\\${}", "{}%", "{} %", "**{}**", "\\boxed{{{}}}", "({})",
    "{} apples", "{}kg", "x = {}", "about {}", "{}!", "{}, as said", "{} (in all)", "$ {} $",
]  # fmt: skip
TAILS = ["", "\n", "\n\nQuestion: Tom has 3 pens.\n#### 7", " \n#### 1", "</s>"]


@given(
    number=st.integers(0, 10**9),
    decimals=st.one_of(st.none(), st.integers(0, 99)),
    separated=st.sampled_from(sorted(SEPARATED)),
    sign=st.one_of(st.none(), st.sampled_from(SIGNS)),
    around=st.sampled_from(AROUND),
    tail=st.sampled_from(TAILS),
)
def test_the_value_found_is_the_number_or_none(
    number: int,
    decimals: int | None,
    separated: str,
    sign: str | None,
    around: str,
    tail: str,
) -> None:
    text, worth = SEPARATED[separated](number), Fraction(number)
    if decimals is not None:
        text, worth = f"{text}.{decimals:02}", worth + Fraction(decimals, 100)
    if sign is not None:
        text, worth = sign + text, -worth
    written = around.format(text)
    found = AFTER.find(f"We add.\n#### {written}{tail}")
    assert found is None or value(found) in (worth, None), (written, found)
    found = LAST.find(f"It comes to {written}")
    assert found is None or value(found) in (worth, None), (written, found)


@given(
    whole=st.integers(0, 99),
    top=st.integers(1, 20),
    bottom=st.integers(1, 20),
    form=st.sampled_from(
        ["{w} {t}/{b}", "{w}\\frac{{{t}}}{{{b}}}", "{t}/{b}", "\\frac{{{t}}}{{{b}}}"]
    ),
)
def test_fractions_are_right_or_none(
    whole: int, top: int, bottom: int, form: str
) -> None:
    worth = Fraction(top, bottom) + (whole if "{w}" in form else 0)
    found = AFTER.find("#### " + form.format(w=whole, t=top, b=bottom))
    assert found is None or value(found) == worth


@given(st.text(alphabet="0123456789.,+-−$€%/ \u2009½^e'", max_size=12))
def test_no_text_breaks_it(text: str) -> None:
    found = AFTER.find(f"#### {text}")
    assert found is None or value(found) is not None


@pytest.mark.parametrize(
    "form", ["{}", "2 {}/3", "\\frac{{{}}}{{3}}", "1/{}", "10^{}", "2^{}", "1e{}"]
)
def test_a_number_of_thousands_of_digits_is_no_answer(form: str) -> None:
    """Python refuses to read more than 4,300 digits."""
    assert AFTER.find("#### " + form.format("7" * 5000)) is None


@pytest.mark.parametrize(
    "text", ["7 - 5", "18-20", "$7 -5", "between 5 and 7-9", "at 3:30"]
)
def test_a_dash_that_may_be_no_minus_is_no_last_number(text: str) -> None:
    assert LAST.find(text) is None


def test_the_first_answer_counts_and_a_thought_does_not() -> None:
    run_on = (
        "9 * 2 = 18.\n#### 18\n\n"
        "Question: Tom has 3 pens and buys 4.\nAnswer: 3 + 4 = 7\n#### 7"
    )
    assert AFTER.find(run_on) == "18"
    assert (
        AFTER.find("<think>As in the example: #### 5</think>So it is\n#### 18") == "18"
    )
    assert AFTER.find("End with ####\nthen the number.\n#### 18") == "18"
    assert LAST.find("<think>5 or 6?</think>") is None
