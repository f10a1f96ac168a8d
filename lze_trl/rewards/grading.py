"""Reading and comparing answers with math-verify.

A bare answer is read as the contents of a `\\boxed{}`, never as prose: math-verify's search in prose takes "2^{10}" for 2, "6+9i"
for 6 and "1,2" for 1.2. It also takes any number near the word "answer", so announcements are found here.
"""

import logging
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import product
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, grader, parse, parser, verify
from sympy import Basic, I, MatrixBase

from . import math_verify_fixes as fixes
from .timeouts import GradingTimeout, run_with_timeout


logger = logging.getLogger(__name__)

GOLD_SECONDS = 5.0
"""Most computing time that reading a gold answer may take, which happens once."""

# math-verify warns that its own timeouts, which need whole seconds, are off. Ours are in `timeouts`
parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer
_BARE_ANSWER_CHARACTERS, _SENTENCE_CHARACTERS = 100, 1000
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")  # not the name of a LaTeX command
# Special tokens, and emojis that cheer
_SIGNS = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?s>|<(?:eos|bos|pad|end_of_turn)>|[☺✅✓✔🎉💯🙂😀-😊]")

# Commands that show nothing by themselves: blanks with their lengths, fonts, brackets, and commands with arguments
_LAYOUT = re.compile(
    r"\\[hv]?(?:space|phantom)\*?\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[^{}]*\}"
    r"|\\(?:text[a-z]*|math[a-z]+|[hm]box|boxed|fbox|operatorname|boldsymbol|left|right|q?quad|space|square|Box|underline|overline|"
    r"[cl]?dots|[dt]?frac|sqrt)(?![a-zA-Z])"
    r"|\\[,;:!\\_ ]|[{}~$_\s]+"
)
_CONTENT = re.compile(r"[^\W_]|\\[a-zA-Z]|[<>=∞∅]")
_PLACEHOLDER = re.compile(
    r"unknown|unclear|(?:i )?(?:do not|don['’]?t) know|no answer|n\s*/\s*a|tbd|"
    r"(?:(?:insert|enter|put|write) )?(?:the |your |final |my )*(?:answer|result)(?: here)?",
    re.IGNORECASE,
)

# We strip units ourselves (`fixes.rewrite`): math-verify drops everything after the first `\text{`
_LATEX = (
    LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True),
    ),
)

_THOUGHTS = {  # marks around the thinking of models; the last is what is left of gpt-oss's when special tokens are skipped
    r"<(?:seed:)?think(?:ing)?>": r"</(?:seed:)?think(?:ing)?>",
    r"<(?:thought|reasoning)>": r"</(?:thought|reasoning)>",
    r"\[THINK\]": r"\[/THINK\]",
    r"◁think▷": r"◁/think▷",
    r"<\|(?:begin_of_thought|START_THINKING)\|>": r"<\|(?:end_of_thought|END_THINKING)\|>",
    r"<\|channel>thought": r"<channel\|>",
    r"<\|channel\|>analysis(?:<\|message\|>)?": r"<\|channel\|>final(?:<\|message\|>)?",
    r"\Aanalysis(?=[A-Z\d])": r"\Aanalysis(?=[A-Z\d])(?s:.*)assistantfinal",
}
_THOUGHT_BEGIN, _THOUGHT_END = ("|".join(marks) for marks in (_THOUGHTS.keys(), _THOUGHTS.values()))

_ANNOUNCEMENT = re.compile(
    r"""(?:
        \b(?:answers?|(?:correct|right|best)\s+(?:option|choice))\b
            (?:[^.:=\n]|\.\d){0,60}? (?:\b(?:is|are|equals|be)\b|[:=])      # "the answer to this is"
        |^[^\w\n]*(?:(?:the|my|final|correct)\s+)*answers?\b(?=[\W_]{0,9}[\d$\\\n(-])     # "**Final answer** 27"
        |^[^\w\n]*ans\b\.?\s*[:=]
        |^[^\w\n]*a:(?=[^\n]*\s*\Z)                                                      # the last line, not option A
    )[\s*_:}]*""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_THE = r"(?:\W+(?:that|the|my|our|its|final|correct|right))*\W*"
_SUPPOSED = re.compile(
    rf"\b(?:if|whether|suppos(?:e|ing)|assum(?:e|ing)|imagine|pretend|unless|say){_THE}\Z", re.IGNORECASE
)
_UNSURE = re.compile(
    r"\b(?:not?\b(?! (?:hard|difficult|surpris\w+|doubt))|never|cannot|may|might|could|hardly|nobody|(?<!no )doubt|unlikely|"
    r"impossible|wrong|false)\b|n['’]t\b",
    re.IGNORECASE,
)
# Words that may stand between the announcement and the value
_FILLER = re.compile(
    r"(?:(?:as follows|(?:equal|equivalent) to|given by|found to be|going to be|therefore|thus|hence|then|indeed|just|simply|exactly|"
    r"precisely|clearly|obviously|actually|only|definitely|certainly|the following|(?:(?:the|an?) (?:(?:final|correct|ordered) )?)?"
    r"(?:number|value|total(?: of)?|option|choice|letter|point|pair|interval|set)|the|an?(?=\s+[\d$\\]))\b[\s:,*]*)+",
    re.IGNORECASE,
)
_ELLIPSIS = re.compile(r"\.\.\.|…|\\[cl]?dots(?![a-zA-Z])")  # math-verify drops it
_SENTENCE_END = re.compile(r"\n|[.!?](?=[\s*]|$)")
_PARTS_OF_VALUES = ("and", "or", "percent", *fixes.MAGNITUDES)
_LETTER = re.compile(r"\(?([A-Z])\)(?!\s*(?:[,/&]|and\b|or\b))")
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\.|[^$\n\\])+)\$(?!\d)", re.DOTALL)
_TEXT_IN_MATH = re.compile(r"\\(?:text|mbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}")
_CHANGED = re.compile(
    rf"\b(?:{fixes.CHANGES}|(?:is|was|are)(?: not|n['’]t))\b|(?:and|times|plus|minus|over|to|by|point)\s+[-($\\]*\d",
    re.IGNORECASE,
)
_REASON = re.compile(r"\b(?:since|because|as|which|where|when|given)\b", re.IGNORECASE)
_TAKEN_BACK = re.compile(
    r"\W*(?:no|or|wait|but wait|actually|oops|sorry|correction|hmm|scratch|alternatively|just kidding)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Answer:
    """An answer that was read: SymPy expressions and their text, or the text alone."""

    values: tuple[Any, ...]
    units: frozenset[tuple[int, str]] = frozenset()  # kinds and names; they are not part of the values

    @property
    def text(self) -> str:
        """Return the part of the text that was read."""
        return str(self.values[-1])

    @property
    def expressions(self) -> tuple[Basic | MatrixBase, ...]:
        """Return the values that SymPy can compare. Without one, an answer equals only the same text."""
        return tuple(value for value in self.values if isinstance(value, (Basic, MatrixBase)))


def gold_text(value: Any) -> str | None:
    """Return the text of a gold answer: of a text, of a number ("27" of 27.0), or of a list with one; `None` if there is none."""
    if isinstance(value, list) and len(value) <= 1:
        value = value[0] if value else None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, float):
        if abs(value) > 2**53:
            raise TypeError(f"{value!r} was read as a float, and may have lost digits. Write the answers as text.")
        return str(int(value)) if value.is_integer() else f"{Decimal(repr(value)):f}"
    if isinstance(value, (str, int)):
        return str(value).strip() or None
    raise TypeError(
        f"A gold answer must be text, a number or a list with one of them, got {type(value).__name__}: {value!r}."
    )


def gold_texts(value: Any) -> list[str]:
    """Return the texts of the gold answers for one prompt, of a list or of a single one. Each of them is right."""
    texts = [gold_text(gold) for gold in (value if isinstance(value, (list, tuple)) else [value])]
    return [text for text in texts if text is not None]


def last_boxed(text: str, braced: bool = False) -> str | None:
    r"""
    Return the contents of the last `\boxed{…}` or `\fbox{…}`, if there is one and it is closed; `\boxed 5` counts as well, unless
    `braced`. A box without an answer is skipped if there is another, and the word `\boxed` in a sentence is not a box.

    math-verify joins neighbouring boxes, but worked solutions box a value and then its other form, or an intermediate result.
    """
    blank = None
    for command in reversed([*_BOX.finditer(text)]):
        rest = text[command.end() :]
        if not rest.startswith("{"):
            box = rest.partition("$")[0].strip()  # \boxed 5$
            if box and not _WORD.search(box.partition("\n")[0]):
                return None if braced else box
            continue
        content = _braced(rest)
        if content is None or not is_blank(content):
            return content
        blank = blank or content
    return blank or None


def _braced(text: str) -> str | None:
    """Return what stands between the opening brace of a text and the brace that closes it, if there is one."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[1 : brace.start()].strip()
    return None


def shown_words(box: str) -> str:
    """Return what a box shows, without fonts, blanks and brackets."""
    return " ".join(_LAYOUT.sub(" ", box).split())


def is_blank(box: str) -> bool:
    r"""Return whether a box holds no answer: nothing, a blank (`\text{ }`, `\square`, `___`), or a placeholder ("your answer here", "N/A")."""
    shown = shown_words(box)
    return _CONTENT.search(shown) is None or _PLACEHOLDER.fullmatch(shown.strip(" .!:…<>[]()\"'")) is not None


def marked_answer(text: str) -> str | None:
    """Return what follows the last `####` in its line, as in GSM8K; `None` if there is no mark."""
    _, mark, rest = text.rpartition("####")
    return (rest.strip().partition("\n")[0].strip() or None) if mark else None


def after_thinking(text: str) -> str:
    """
    Return the text after `</think>`, or the mark of another model; empty if the thinking was truncated. If the prompt begins the
    thinking, put its [`thinking_prefix`] before the text.
    """
    *_, end = [None, *re.finditer(_THOUGHT_END, text)]
    rest = text if end is None else text[end.end() :]
    begin = re.search(_THOUGHT_BEGIN, rest)
    return rest if begin is None else rest[: begin.start()]


def thinking_prefix(prompt: str) -> str:
    """Return the mark at the end of a prompt that begins the thinking, which some chat templates put there; else an empty text."""
    begin = re.search(rf"(?:{_THOUGHT_BEGIN})\s*\Z", prompt[-100:])
    return "" if begin is None else begin[0]


def final_part(text: str) -> str:
    """Return the text after the thinking; only what stands between `<answer>` and `</answer>` there, if anything does."""
    text = after_thinking(text)
    parts = [part.partition("</answer>")[0].strip() for part in text.split("<answer>")[1:]]
    return next((part for part in reversed(parts) if part), text.strip())


@lru_cache(maxsize=8192)  # every completion of a group has the same gold answer
def read_gold(gold: str) -> Answer | None:
    r"""
    Read a gold answer, in LaTeX or plain: a bare one, or a worked solution that boxes, marks (`####`) or announces it.

    Returns `None` if it cannot be read, or not in time.
    """
    text = _SIGNS.sub("", final_part(gold))
    with suppress(GradingTimeout):
        return run_with_timeout(
            lambda: _read_boxed_or_marked(text) or _read_announced(text) or _read_plain(text), seconds=GOLD_SECONDS
        )
    return None


def read_answer(completion: str) -> Answer | None:
    r"""
    Read the answer that a completion gives in its [`final_part`]: the last `\boxed{}`, what follows the last `####`, an announced
    answer ("the answer is …", "Answer: …"), or all of a short text. An announced answer comes before words after `####`, which
    Markdown makes a heading. A number somewhere in the text is not an answer.

    Returns `None` if there is no answer, and raises [`GradingTimeout`] if it cannot be read in time.
    """
    return run_with_timeout(_read_completion, _SIGNS.sub("", final_part(completion)))


def _read_completion(text: str) -> Answer | None:
    if (answer := _read_boxed_or_marked(text)) is not None:
        return answer
    if re.search(_BOX.pattern + r"\{", text):
        return None  # cut off within the box
    is_bare = len(text) <= _BARE_ANSWER_CHARACTERS and "\n" not in text
    return _read_announced(text) or (_read_plain(text) if is_bare else None)


def answers_equal(gold: Answer, answer: Answer) -> bool:
    """Return whether two answers are equal, as far as math-verify can tell. Raises [`GradingTimeout`] if it takes too long."""
    return run_with_timeout(_are_equal, gold, answer)


def _are_equal(gold: Answer, answer: Answer) -> bool:
    if fixes.differ_in_units(gold.units, answer.units):
        return False
    if gold.text == answer.text:
        return True
    options = fixes.split_option(gold.text), fixes.split_option(answer.text)
    if any(map(all, options)):  # "(B) 27" equals B, and 27
        parts = [(_read_plain(a), _read_plain(b)) for a, b in zip(*options, strict=True) if a and b]
        return bool(parts) and all(a is not None and b is not None and _are_equal(a, b) for a, b in parts)
    are_equal_texts = fixes.equal_as_text(gold.text, answer.text)
    if are_equal_texts is not None:
        return are_equal_texts
    return any(_equal_values(*pair) for pair in product(gold.expressions, answer.expressions))


def _equal_values(gold: Any, value: Any) -> bool:
    settings: dict[str, Any] = {"timeout_seconds": None, "raise_on_error": True, "allow_set_relation_comp": True}
    try:
        if verify(gold, value, **settings) and fixes.is_really_equal(gold, value):
            return True
        if gold.has(fixes.PERCENT) != value.has(fixes.PERCENT):
            numbers = gold.subs(fixes.PERCENT, 1), value.subs(fixes.PERCENT, 1)
            return not fixes.is_share(numbers[0]) and _equal_values(*numbers)
        complex_ones = [side.subs({i: I for i in side.free_symbols if i.name == "i"}) for side in (gold, value)]
        return complex_ones != [gold, value] and _equal_values(*complex_ones)
    except Exception:  # SymPy raises anything on what a model can write; such a pair is not known to be equal
        logger.debug("math-verify could not compare two answers.", exc_info=True)
        return False


def _read_boxed_or_marked(text: str) -> Answer | None:
    """Read the answer that a text boxes, or marks with `####`, unless the mark makes a heading above an announced answer."""
    boxed = last_boxed(text)
    answer = boxed or marked_answer(text)
    if answer is None:
        return None
    is_heading = boxed is None and _WORD.search(answer) is not None
    return (_read_announced(text) if is_heading else None) or _read_plain(answer)


def _read_announced(text: str) -> Answer | None:
    """
    Read what follows the last "the answer is": formulas, an option, what stands before the first word, or a short sentence. If the
    sentence or the next one changes it ("12 or 13", "not 12"), the answer is the whole sentence as text, which equals no other.
    """
    announcement, clause = _last_announcement(text)
    if announcement is None:
        return None
    rest = text[announcement.end() :][:_SENTENCE_CHARACTERS]
    masked = _mask_formulas(rest)
    filler = _FILLER.match(masked)
    begin = filler.end() if filler else 0
    sentence_end = _SENTENCE_END.search(masked, begin)
    stop = sentence_end.start() if sentence_end else len(rest)
    letter = _LETTER.match(masked, begin, stop)
    words = (word.start() for word in _WORD.finditer(masked, begin, stop) if word[0] not in _PARTS_OF_VALUES)
    end = letter.end() if letter else next(words, stop)
    value = re.sub(r"\s(?:and|or)\s*$", "", rest[begin:end]).replace("*", "").rstrip(" ,;:([`").lstrip(" ,;:`")
    if value in ("", "a"):  # an article
        value, end = rest[begin:stop].replace("*", "").strip(), stop
        if len(value) > _BARE_ANSWER_CHARACTERS:
            return None
    reservation = _REASON.split(masked[max(begin, end - 4) : stop])[0]  # of what follows the value, all but a reason
    is_doubtful = _UNSURE.search(clause + announcement[0]) or rest[stop : stop + 1] == "?"
    is_changed = _CHANGED.search(reservation) or _TAKEN_BACK.match(rest, stop + 1)
    if is_doubtful or is_changed or not _is_one_value_or_list(value):
        return Answer((announcement[0] + rest[:stop],))
    return _read_plain(_LETTER.sub(r"\1", value) if letter else value) if value else None


def _last_announcement(text: str) -> tuple[re.Match | None, str]:
    """Find the last announcement of an answer that is not a supposition, and the clause before it."""
    for announcement in reversed([*_ANNOUNCEMENT.finditer(text)]):
        begin = announcement.start()
        clause = re.split(r"[,;.!?\n]", text[max(0, begin - 80) : begin])[-1]
        if not _SUPPOSED.search(clause):
            return announcement, clause
    return None, ""


def _mask_formulas(text: str) -> str:
    """Replace formulas by zeros: words and points in them are not those of the sentence."""
    without_math = _MATH.sub(lambda match: _zeros(match) if _is_formula(match) else match[0], text)
    return _TEXT_IN_MATH.sub(_zeros, without_math)


def _zeros(match: re.Match) -> str:
    return "0" * len(match[0])


def _is_formula(match: re.Match) -> bool:
    """Return whether dollar signs enclose a formula, and not the words between two prices."""
    inside = match[match.lastindex or 0]
    return inside == inside.strip() or not _WORD.search(_TEXT_IN_MATH.sub("", inside))


def _is_one_value_or_list(value: str) -> bool:
    """Return whether a text has at most one formula, or nothing between several that makes no list."""
    between = _MATH.sub("", value)
    return len(_MATH.findall(value)) < 2 or re.fullmatch(r"(?:[\s,;]|\b(?:and|or)\b)*", between) is not None


@lru_cache(maxsize=8192)  # completions of a group give few different answers, and reading takes most time
def _read_plain(text: str) -> Answer | None:
    """Read a text that is all answer, as the contents of a box."""
    text = re.sub(r"(?<![.,])[.]$", "", text.strip())
    formula = _MATH.fullmatch(text)
    text = text if formula is None else formula[formula.lastindex or 0].strip()
    units = fixes.unit_names(text)
    text = text if fixes.is_too_large(text) else fixes.rewrite(text)
    if _braced(f"{{{text}}}") != text.strip():
        return None
    words = fixes.as_words(text)
    if words is not None or fixes.is_too_large(text) or _ELLIPSIS.search(text):
        return Answer((words or text,), units)
    try:
        values = parse(f"\\boxed{{{text}}}", extraction_config=_LATEX, parsing_timeout=None, raise_on_error=True)
        return Answer(tuple(fixes.with_union(text, values)), units) if values else None
    except Exception:  # ANTLR and SymPy raise anything on what a model can write
        logger.debug("math-verify could not read an answer.", exc_info=True)
        return None
