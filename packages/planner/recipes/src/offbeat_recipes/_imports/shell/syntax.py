"""The syntax of bash, as far as scripts that start a program use it: a text becomes commands made of words.

Nothing is run or evaluated here; `reading` gives the words their values.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from offbeat_recipes._imports.shell.nodes import (
    Arithmetic,
    Assignment,
    Branches,
    Case,
    Command,
    Commands,
    Group,
    Joined,
    Line,
    Loop,
    Negated,
    Parameter,
    Part,
    Simple,
    Substitution,
    Test,
    Text,
    Word,
)

_BLANKS: Final = re.compile(r"(?:[ \t]|\\\n)+")
_PLAIN: Final = re.compile(r"[^\s\\\"'$`;&|<>()]+")
_PLAIN_QUOTED: Final = re.compile(r"[^\\\"$`]+")
_REDIRECTION: Final = re.compile(r"\d*(?:&>>|&>|>>|>\||>&|<&|<<<|<<-|<<|<|>)|\{\w+\}>")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=")
_HOME: Final = re.compile(r"~(?=[/\s;]|$)")
_BARE_PARAMETER: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER: Final = re.compile(r"([!#]?)(\w+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_RESERVED: Final = re.compile(r"(if|case|for|while|until|select|function|\{|!|\[\[|time)(?=[\s;]|$)")
_CLOSING: Final = re.compile(r"(then|elif|else|fi|do|done|esac|\})(?=[\s;&|)<>]|$)")
DECLARING: Final = frozenset({"export", "local", "declare", "readonly", "typeset"})
_ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class ShellSyntaxError(Exception):
    """The text cannot be read from here on."""


@dataclass
class ShellParser:
    """Reads one text from front to back.

    Args:
        text: of a script.
    """

    text: str
    at: int = 0
    _here_documents: list[tuple[str, bool]] = field(default_factory=list)

    def script(self, notify: Callable[[str], None]) -> Commands:
        """Return all commands; a line that cannot be read is reported and left out."""
        found: list[Line] = []
        while self._skip_to_command():
            start = self.at
            try:
                found.append(self._line())
            except (ShellSyntaxError, RecursionError):
                self.at = start
                notify(self._rest_of_line())
        return tuple(found)

    def word(self, *, ends: str = " \t\n;&|<>()", is_quoted: bool = False) -> Word:
        """Characters up to a blank or an operator, in their parts."""
        parts: list[Part] = []
        if not is_quoted and _HOME.match(self.text, self.at):
            parts.append(Parameter("HOME", "", "", "", "~", is_quoted=True))
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] not in ends:
            parts += self._part(is_quoted=is_quoted)
        return tuple(parts)

    def _rest_of_line(self) -> str:
        end = self.text.find("\n", self.at)
        start, self.at = self.at, len(self.text) if end < 0 else end
        return self.text[start : self.at].strip()

    def _commands(self, *ends: str) -> Commands:
        """Commands up to one of these reserved words, which is not read."""
        found: list[Line] = []
        while self._skip_to_command():
            if (closing := _CLOSING.match(self.text, self.at)) and closing[1] in ends:
                return tuple(found)
            if any(end in (")", ";;") and self.text.startswith(end, self.at) for end in ends):
                return tuple(found)
            found.append(self._line())
        raise ShellSyntaxError("the text ends before " + " or ".join(ends))

    def _take(self, *options: str) -> str:
        self._blanks()
        for option in options:
            if self.text.startswith(option, self.at):
                self.at += len(option)
                return option
        raise ShellSyntaxError(f"expected {options[0]}")

    def _blanks(self) -> None:
        if found := _BLANKS.match(self.text, self.at):
            self.at = found.end()
        if self.text.startswith("#", self.at) and (not self.at or self.text[self.at - 1] in " \t\n;&|()"):
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end

    def _newlines(self) -> None:
        while True:
            self._blanks()
            if not self.text.startswith("\n", self.at):
                return
            self.at += 1
            for delimiter, is_indented in self._here_documents:
                self._skip_here_document(delimiter, is_indented=is_indented)
            self._here_documents.clear()

    def _skip_here_document(self, delimiter: str, *, is_indented: bool) -> None:
        while self.at < len(self.text):
            line = self.text[self.at :].split("\n", 1)[0]
            self.at = min(self.at + len(line) + 1, len(self.text))
            if (line.lstrip("\t") if is_indented else line) == delimiter:
                return

    def _skip_to_command(self) -> bool:
        while True:
            self._newlines()
            is_separator = self.text[self.at : self.at + 1] in (";", "&") and not self.text.startswith(";;", self.at)
            if not is_separator:
                return self.at < len(self.text)
            self.at += 1

    def _line(self) -> Line:
        start = self.at
        parts: list[tuple[str, Command]] = [("", self._command())]
        while True:
            self._blanks()
            joint = next((each for each in ("&&", "||", "|") if self.text.startswith(each, self.at)), "")
            if not joint:
                break
            self.at += len(joint) + (joint == "|" and self.text.startswith("|&", self.at))
            self._newlines()
            parts.append((joint, self._command()))
        command = parts[0][1] if len(parts) == 1 else Joined(tuple(parts))
        return Line(command, self.text[start : self.at].strip())

    def _command(self) -> Command:
        self._blanks()
        if self.text.startswith("((", self.at):
            self.at += 1
            expression = self._enclosed("(", ")")
            self._take(")")
            return Test((), expression[1:] if expression.startswith("(") else expression)
        if self.text.startswith("(", self.at):
            self.at += 1
            return self._closed(Group(self._commands(")"), is_subshell=True), ")")
        if found := _RESERVED.match(self.text, self.at):
            self.at = found.end()
            return self._compound(found[1])
        return self._simple()

    def _closed(self, command: Command, end: str) -> Command:
        self._take(end)
        self._redirections()
        return command

    def _compound(self, word: str) -> Command:
        match word:
            case "if":
                return self._if()
            case "case":
                return self._case()
            case "for" | "select":
                return self._for()
            case "while" | "until":
                condition = self._commands("do")
                self._take("do")
                return self._closed(Loop("", (), condition, self._commands("done"), word == "until"), "done")
            case "{":
                return self._closed(Group(self._commands("}")), "}")
            case "function":
                return self._function(self._name())
            case "[[":
                return self._double_bracket()
            case "!":
                return Negated(self._command())
        return self._command()  # time

    def _name(self) -> str:
        self._blanks()
        if not (found := re.compile(r"[\w.:-]+").match(self.text, self.at)):
            raise ShellSyntaxError("expected a name")
        self.at = found.end()
        return found[0]

    def _if(self) -> Command:
        pairs: list[tuple[Commands | None, Commands]] = []
        word = "if"
        while word in ("if", "elif"):
            condition = self._commands("then")
            self._take("then")
            pairs.append((condition, self._commands("elif", "else", "fi")))
            word = self._take("elif", "else", "fi")
        if word == "else":
            pairs.append((None, self._commands("fi")))
            self._take("fi")
        self._redirections()
        return Branches(tuple(pairs))

    def _case(self) -> Command:
        self._blanks()
        word = self.word()
        self._newlines()
        self._take("in")
        items: list[tuple[tuple[Word, ...], Commands]] = []
        while True:
            self._newlines()
            if self.text.startswith("esac", self.at):
                return self._closed(Case(word, tuple(items)), "esac")
            if self.text.startswith("(", self.at):
                self.at += 1
            patterns: list[Word] = []
            while not patterns or self._take("|", ")") == "|":
                self._blanks()
                patterns.append(self.word())
            items.append((tuple(patterns), self._commands(";;", "esac")))
            if self.text.startswith(";;", self.at):
                self.at += 2

    def _for(self) -> Command:
        self._blanks()
        if self.text.startswith("((", self.at):
            raise ShellSyntaxError("a loop that counts")
        name, words = self._name(), []
        self._newlines()
        if self.text.startswith("in", self.at):
            self.at += 2
            self._blanks()
            while self.text[self.at : self.at + 1] not in ("\n", ";", ""):
                words.append(self.word())
                self._blanks()
        self._skip_to_command()
        self._take("do")
        return self._closed(Loop(name, tuple(words), None, self._commands("done")), "done")

    def _function(self, name: str) -> Command:
        self._blanks()
        if self.text.startswith("(", self.at):
            self.at += 1
            self._take(")")
        self._newlines()
        body = self._command()
        return Group(body.body if isinstance(body, Group) else (Line(body, name),), name)

    def _double_bracket(self) -> Command:
        words: list[Word] = []
        while True:
            self._newlines()
            if self.at >= len(self.text):
                raise ShellSyntaxError("expected ]]")
            if self.text.startswith("]]", self.at):
                return self._closed(Test(tuple(words)), "]]")
            found = re.compile(r"&&|\|\||[()<>]").match(self.text, self.at)
            is_pattern = bool(words) and words[-1] == (Text("=~", False),)
            if found and not is_pattern:
                self.at = found.end()
                words.append((Text(found[0], is_quoted=False),))
            else:
                words.append(self.word(ends=" \t\n") if is_pattern else self.word())

    def _redirections(self) -> bool:
        """Skip what leads output elsewhere; whether there was any."""
        found_any = False
        while True:
            self._blanks()
            found = _REDIRECTION.match(self.text, self.at)
            if not found:
                return found_any
            self.at, found_any = found.end(), True
            self._blanks()
            start = self.at
            if self.text.startswith((">(", "<("), self.at):  # to a program, as in > >(tee train.log)
                self.at += 1
                self._enclosed("(", ")")
            else:
                self.word()
            if found[0].lstrip("0123456789") in ("<<", "<<-"):
                delimiter = re.sub(r"[\"'\\]", "", self.text[start : self.at])
                self._here_documents.append((delimiter, found[0].endswith("-")))

    def _simple(self) -> Command:
        assignments: list[Assignment] = []
        words: list[Word] = []
        is_declaring, start = False, self.at
        while True:
            self._redirections()
            if self.text[self.at : self.at + 1] in ("", "\n", ";", "&", "|", ")"):
                break
            if self.text.startswith("(", self.at):
                if len(words) == 1 and not assignments and self.text.startswith("()", self.at):
                    return self._function(_literal(words[0]))
                raise ShellSyntaxError("a parenthesis within a command")
            found = _ASSIGNMENT.match(self.text, self.at) if is_declaring or not words else None
            if found:
                self.at = found.end()
                assignments.append(self._assignment(found))
                continue
            words.append(self.word())
            is_declaring = is_declaring or (len(words) == 1 and _literal(words[0]) in DECLARING)
        if self.at == start:
            raise ShellSyntaxError("expected a command")
        return Simple(tuple(assignments), tuple(words))

    def _assignment(self, found: re.Match[str]) -> Assignment:
        if not self.text.startswith("(", self.at):
            return Assignment(found[1], found[2], bool(found[3]), self.word(), is_array=False)
        self.at += 1
        values: list[Word] = []
        while True:
            self._newlines()
            if self.at >= len(self.text):
                raise ShellSyntaxError("expected )")
            if self.text.startswith(")", self.at):
                self.at += 1
                return Assignment(found[1], found[2], bool(found[3]), tuple(values), is_array=True)
            before = self.at
            values.append(self.word())
            if self.at == before:
                raise ShellSyntaxError("an operator within an array")

    def _part(self, *, is_quoted: bool) -> list[Part]:
        character = self.text[self.at]
        if character == "\\":
            return self._escape(is_quoted=is_quoted)
        if character == "'" and not is_quoted:
            end = self._find("'", self.at + 1)
            text, self.at = self.text[self.at + 1 : end], end + 1
            return [Text(text, is_quoted=True)]
        if character == '"':
            return self._double_quoted()
        if character == "`":
            end = self._find("`", self.at + 1)
            command, self.at = self.text[self.at + 1 : end], end + 1
            return [Substitution(command, f"`{command}`", is_quoted)]
        if character == "$":
            return [self._dollar(is_quoted=is_quoted)]
        found = (_PLAIN_QUOTED if is_quoted else _PLAIN).match(self.text, self.at)
        text = found[0] if found else character
        self.at += len(text)
        return [Text(text, is_quoted)]

    def _find(self, end: str, start: int) -> int:
        found = self.text.find(end, start)
        if found < 0:
            raise ShellSyntaxError(f"expected {end}")
        return found

    def _escape(self, *, is_quoted: bool) -> list[Part]:
        following = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if following == "\n":
            return []
        if is_quoted and following not in '$`"\\':
            return [Text("\\" + following, is_quoted=True)]
        return [Text(following, is_quoted=True)]

    def _double_quoted(self) -> list[Part]:
        self.at += 1
        parts: list[Part] = [Text("", is_quoted=True)]
        while not self.text.startswith('"', self.at):
            if self.at >= len(self.text):
                raise ShellSyntaxError('expected "')
            parts += self._part(is_quoted=True)
        self.at += 1
        return parts

    def _dollar(self, *, is_quoted: bool) -> Part:
        start, self.at = self.at, self.at + 1
        if self.text.startswith("((", self.at):
            end = self.at
            inner = self._enclosed("(", ")")
            if inner.startswith("(") and inner.endswith(")"):
                return Arithmetic(inner[1:-1])
            self.at = end
        if self.text.startswith("(", self.at):
            command = self._enclosed("(", ")")
            return Substitution(command, self.text[start : self.at], is_quoted)
        if self.text.startswith("{", self.at):
            inner = self._enclosed("{", "}")
            if not (found := _PARAMETER.fullmatch(inner)):
                raise ShellSyntaxError(f"${{{inner}}}")
            prefix, name, index, rest = found[1], found[2], found[3] or "", found[4]
            return Parameter(name, prefix, index, rest, self.text[start : self.at], is_quoted)
        if self.text.startswith('"', self.at) and not is_quoted:  # a text to be translated
            return Text("", is_quoted)
        if self.text.startswith("'", self.at) and not is_quoted:
            end = self._find("'", self.at + 1)
            text, self.at = self.text[self.at + 1 : end], end + 1
            return Text(re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[0]), text), is_quoted=True)
        if found := _BARE_PARAMETER.match(self.text, self.at):
            self.at = found.end()
            return Parameter(found[0], "", "", "", self.text[start : self.at], is_quoted)
        return Text("$", is_quoted)

    def _enclosed(self, begin: str, end: str) -> str:
        """Return the text between two brackets, which may hold others of their kind, and quotes."""
        start, depth = self.at + 1, 0
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "\"'`":
                self.at = self._quote_end(character)
            elif character == "\\":
                self.at += 1
            elif character == "#" and begin == "(" and self.text[self.at - 1] in " \t\n":
                self.at = self._find("\n", self.at)
            else:
                depth += (character == begin) - (character == end)
            self.at += 1
            if not depth:
                return self.text[start : self.at - 1]
        raise ShellSyntaxError(f"expected {end}")

    def _quote_end(self, quote: str) -> int:
        at = self.at + 1
        while at < len(self.text) and self.text[at] != quote:
            at += 2 if self.text[at] == "\\" and quote != "'" else 1
        return at


def _literal(word: Word) -> str:
    """Return a word without anything to put in; "" otherwise."""
    texts = [part.text for part in word if isinstance(part, Text)]
    return "".join(texts) if len(texts) == len(word) else ""
