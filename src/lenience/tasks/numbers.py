r"""Numbers as people and models write them, and their values.

A number may have a sign, a currency or percent sign, separators of thousands (comma, point,
apostrophe, spaces in groups of three), a decimal point or comma (3,5 and 1.234,5; 1,234 is a
thousand), an exponent (10^6, 1e6, 5 × 10³), a factor in words (2 million), or be a fraction (3/4,
½, \frac{3}{4}, 2 1/2). Percent signs do not count: 50 % is 50.

A form that is not understood has no value: it is never read as another number.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MOST_DIGITS = 400
"""Maximum length of a number, and maximum exponent."""

SPACES = " \t\u00a0\u2007\u2009\u202f"
CURRENCIES = "$€£¥₹"
DASHES = "-−–"
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
FACTORS = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_S = f"[{SPACES}]"
_DIGITS = (
    rf"(?:[0-9]{{1,3}}(?:{_S}[0-9]{{3}})+(?![0-9]|{_S}[0-9])(?:[.,][0-9]+(?![0-9]))?"  # 1 000,5
    r"|[0-9]{1,3}(?:['’_][0-9]{3})+(?![0-9'’_])(?:\.[0-9]+)?"  # 1'000.5
    r"|[0-9](?:[0-9.,]*[0-9])?"  # 1,000.5 and 1.000,5
    r"|[.,][0-9]+)"
)


def _fraction_named(mark: str) -> str:
    r"""Return a regular expression for \frac or a one-character fraction such as ½. The names of
    its groups end with `mark`."""
    return (
        rf"(?:\\[dt]?frac\s*(?:\{{\s*(?P<a{mark}>[0-9]+)\s*\}}\s*\{{\s*(?P<b{mark}>[0-9]+)\s*\}}"
        rf"|(?P<c{mark}>[0-9])\s*(?P<d{mark}>[0-9]))"
        rf"|(?P<e{mark}>[¼-¾⅐-⅞↉]))"
    )


def _power_named(mark: str) -> str:
    """Return a regular expression for a raised exponent. The names of its groups end with
    `mark`."""
    return (
        rf"(?:(?:\^|\*\*)\s*(?P<power{mark}>\{{\s*[-−]?[0-9]+\s*\}}|[-−]?[0-9]+)"
        rf"|(?P<super{mark}>[⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+))"
    )


_TEN = rf"{_S}*(?:×|\\times|\\cdot|·|\*|x){_S}*10{_power_named('')}"
_NUMBER = re.compile(
    rf"(?P<sign>[{DASHES}+]{_S}*)?"
    rf"(?P<money>(?:US|A|C|HK)?\\?[{CURRENCIES}]{_S}*)?"
    rf"(?P<sign2>[-−+]{_S}*)?"
    rf"(?:(?P<whole>{_DIGITS})(?:"
    rf"(?P<science>{_TEN})"
    rf"|(?P<exponent>[eE][-+−]?[0-9]+)(?![0-9A-Za-z.])"
    rf"|(?P<raised>{_power_named('2')})"
    rf"|{_S}?[/⁄]{_S}?(?P<bottom>[0-9](?:[0-9.,]*[0-9])?)"
    rf"|{_S}+(?P<mixed>[0-9]+){_S}?[/⁄]{_S}?(?P<mixed2>[0-9]+)"
    rf"|{_S}?(?P<part>{_fraction_named('')})"
    rf")?|(?P<fraction>{_fraction_named('2')}))"
)
_UNIT = re.compile(rf"{_S}*(?:\\?%|\\?[{CURRENCIES}]|°)")
_WORD = re.compile(rf"{_S}*(?P<word>[a-z]+)", re.I)


@dataclass(frozen=True)
class Number:
    """A number in a text: its position, its text and its value, or None for an unknown form."""

    start: int
    end: int
    text: str
    value: Fraction | None


def numbers(text: str) -> Iterator[Number]:
    """Yield the numbers in a text, in order. Digits that are part of a name, as in x5 or A4, do not
    count."""
    text = plain_text(text)
    at = 0
    while found := _NUMBER.search(text, at):
        number = _read(text, found)
        at = max(number.end, found.end())
        if not _is_name(text, found):
            yield number


def value(text: str) -> Fraction | None:
    """Return the value of a text that is a single number, ignoring emphasis, brackets and LaTeX's
    dollar signs. None if the text holds anything else, or the form is not understood."""
    plain = plain_text(text).replace("</s>", "")
    plain = plain.strip(" \t\r\n*_`()[]").rstrip(".,;:!").strip(" \t\r\n*_`()[]")
    if plain.startswith("$") and plain.endswith("$") and len(plain) > 2:
        plain = plain.strip("$").strip()
    for _ in range(2):
        whole = re.fullmatch(r"\\(?:f?boxed|text|mathrm)\s*\{(.*)\}|\{(.*)\}", plain)
        if whole:
            plain = (whole[1] or whole[2] or "").strip()
    found = list(numbers(plain))
    if len(found) != 1 or found[0].start != 0:
        return None
    rest = plain[found[0].end :].strip(" \t.,")
    return found[0].value if not rest else None


def plain_text(text: str) -> str:
    """Return a text with ASCII digits and signs, and without LaTeX's digit separators."""
    text = (
        text.replace("{,}", ",")
        .replace("\\,", "\u2009")
        .replace("\\!", "")
        .replace("\\ ", " ")
    )
    text = (
        text.replace("＋", "+").replace("－", "-").replace("．", ".").replace("，", ",")
    )
    return "".join(
        str(unicodedata.decimal(char))
        if unicodedata.decimal(char, None) is not None
        else char
        for char in text
    )


def _is_name(text: str, found: re.Match[str]) -> bool:
    """Return True if the digits continue a word, as in x5."""
    first = found.start("whole") if found["whole"] else found.start("fraction")
    before = text[first - 1 : first]
    return first == found.start() and (before.isalnum() or before == "_")


def _read(text: str, found: re.Match[str]) -> Number:
    """Return a matched number with its unit or factor. Its value is None if the text around it
    makes it part of another form."""
    end = found.end()
    amount = _amount(found)
    unit = _UNIT.match(text, end)
    if unit:
        end = unit.end()
    elif (word := _WORD.match(text, end)) and word["word"].lower().rstrip(
        "s"
    ) in FACTORS:
        end = word.end()
        amount = (
            None
            if amount is None
            else amount * FACTORS[word["word"].lower().rstrip("s")]
        )
    negative = _sign(text, found)
    if amount is not None and negative is not None and _stands_alone(text, found, end):
        return Number(
            found.start(),
            end,
            text[found.start() : end],
            -amount if negative else amount,
        )
    return Number(found.start(), end, text[found.start() : end], None)


def _sign(text: str, found: re.Match[str]) -> bool | None:
    """Return True for a negative number and False for a positive one; None if the dash may be a
    minus, a range or a bullet."""
    signs = [sign for sign in (found["sign"], found["sign2"]) if sign]
    if not signs:
        return False
    if len(signs) > 1:
        return None
    sign = signs[0]
    before = text[: found.start()].rstrip(SPACES)
    spaced = sign[-1] in SPACES
    glued = found.start() == len(before)
    if found["sign"] and re.search(r"[0-9)\]}%°]$", before):
        return None  # 7-5, 7 - 5, 7 -5
    if found["sign"] and (glued or spaced) and re.search(r"[\w.!?]$", before):
        return None  # about-5, about - 5
    if (
        found["sign"]
        and spaced
        and (before.endswith("\n") or (not before and "\n" in text))
    ):
        return None  # a bullet
    return sign[0] in DASHES


def _stands_alone(text: str, found: re.Match[str], end: int) -> bool:
    """Return True unless the text around the number gives it another form: a time, a date, a range,
    a product, a root, a list of numbers."""
    before = text[: found.start()].rstrip(SPACES)
    if before.endswith(("√", "±", "\\pm", "\\sqrt{", "\\sqrt", "^", "^{", "/", "⁄")):
        return False
    if re.search(r"[0-9][-–:/.,]$", before) and len(before) == found.start():
        return False
    rest = text[end:]
    if re.match(
        rf"[eE]?[0-9]|{_S}*[/⁄:]{_S}*[0-9]|{_S}*\^|[-–—]{_S}*[0-9$]|{_S}+[0-9½]", rest
    ):
        return False
    if re.match(rf"{_S}*[a-z]+{_S}+and{_S}+[0-9$]", rest, re.I):
        return False
    if re.match(rf",{_S}*[0-9]|[.,'’_][0-9]|{_S}*(?:or|to){_S}+[0-9$]", rest):
        return False
    if re.match(rf"{_S}*(?:√|π|\\(?:sqrt|pi)\b|!{_S}*[=/*])", rest):
        return False
    if re.match(rf"{_S}?(?:k|K|M|B|bn|mn|x|n|y|i|e|π)(?![A-Za-z'’])", rest):
        return False
    return not re.match(rf"{_S}*[/⁄]{_S}*[(a-z]?[0-9]", rest)


def _amount(found: re.Match[str]) -> Fraction | None:
    """Return the absolute value of a match; None if it is not understood."""
    if len(found[0]) > MOST_DIGITS:
        return None
    if found["fraction"]:
        return _part(found, "2")
    whole = _digits(found["whole"])
    if whole is None:
        return None
    if found["science"]:
        power = _power(found["power"], found["super"])
        return None if power is None else whole * power
    if found["exponent"]:
        power = _power(found["exponent"][1:], None)
        return None if power is None else whole * power
    if found["raised"]:
        return _raised(whole, found["power2"], found["super2"])
    if found["bottom"]:
        bottom = _digits(found["bottom"])
        return whole / bottom if bottom else None
    if found["mixed"]:
        above = int(found["mixed"])
        below = int(found["mixed2"])
        is_mixed = whole.denominator == 1 and 0 < above < below
        return whole + Fraction(above, below) if is_mixed else None
    if found["part"]:
        part = _part(found, "")
        is_mixed = part is not None and whole.denominator == 1 and part < 1
        return whole + part if part is not None and is_mixed else None
    return whole


def _part(found: re.Match[str], which: str) -> Fraction | None:
    r"""Return the value of a one-character fraction or of \frac; None if its denominator is 0."""
    sign = found[f"e{which}"]
    if sign:
        return Fraction(unicodedata.numeric(sign)).limit_denominator(100)
    top = found[f"a{which}"] or found[f"c{which}"]
    bottom = found[f"b{which}"] or found[f"d{which}"]
    return Fraction(int(top), int(bottom)) if int(bottom) else None


def _exponent(braced: str | None, superscript: str | None) -> int | None:
    text = (braced or superscript or "").translate(SUPERSCRIPTS).replace("−", "-")
    digits = text.strip("{} ")
    return int(digits) if abs(int(digits)) <= MOST_DIGITS else None


def _power(braced: str | None, superscript: str | None) -> Fraction | None:
    """Return ten to the power of a matched exponent; None if it is too large."""
    exponent = _exponent(braced, superscript)
    return None if exponent is None else Fraction(10) ** exponent


def _raised(
    base: Fraction, braced: str | None, superscript: str | None
) -> Fraction | None:
    exponent = _exponent(braced, superscript)
    if exponent is None or (not base and exponent < 0) or base.numerator > 10**6:
        return None
    return base**exponent


def _digits(text: str) -> Fraction | None:
    """Return the value of digits with separators; None if they form no number."""
    plain = re.sub(rf"[{SPACES}'’_]", "", text)
    grouped = plain != text
    if re.fullmatch(r"[0-9]*", plain):
        return Fraction(int(plain))
    if grouped:
        return (
            Fraction(plain.replace(",", "."))
            if re.fullmatch(r"[0-9]+[.,][0-9]+", plain)
            else None
        )
    if re.fullmatch(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?", plain):
        return Fraction(plain.replace(",", ""))
    if re.fullmatch(
        r"[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+|[0-9]{1,3}(?:\.[0-9]{3}){2,}", plain
    ):
        return Fraction(plain.replace(".", "").replace(",", "."))
    if re.fullmatch(r"[0-9]{1,2}(?:,[0-9]{2})*,[0-9]{3}(?:\.[0-9]+)?", plain):
        return Fraction(plain.replace(",", ""))  # 12,34,567
    if re.fullmatch(r"[0-9]*\.[0-9]+|[0-9]*,[0-9]+", plain):
        return Fraction(plain.replace(",", "."))
    return None
