"""Commands that need no shell.

Text goes to ``sh -c``, but most of it is only a program and its arguments, and then the shell does
nothing but read the line and become that program: in gVisor a third of the command's whole time.
As make does, such a line is started directly. Whatever a shell could read in another way, and
whatever cannot be started (the shell has the words for why), goes to the shell.
"""

from __future__ import annotations

SHELL = ["/bin/sh", "-c"]
# No quote, no expansion, no operator, no pattern.
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _./+-:,@%=")
# What a shell does itself, in dash, bash and busybox; a program of that name may differ.
_SHELLS_OWN = frozenset(
    ". : alias bg bind break builtin caller case cd chdir command compgen complete compopt "
    "continue coproc declare dirs disown do done echo elif else enable esac eval exec exit "
    "export false fc fg fi for function getopts hash help history if in jobs kill let local "
    "logout mapfile popd printf pushd pwd read readarray readonly return select set shift shopt "
    "source suspend test then time times trap true type typeset ulimit umask unalias unset "
    "until wait while".split()
)
# Without arguments, these two programs do what the shell does.
_ALIKE = (["true"], ["false"])


def plain_words(argv: list[str]) -> list[str] | None:
    """The program and arguments that a shell's command line comes down to, if it is that plain."""
    if len(argv) != 3 or argv[:2] != SHELL:
        return None
    words = argv[2].split() if _PLAIN.issuperset(argv[2]) else []
    if not words or "=" in words[0]:  # nothing, or an assignment
        return None
    return None if words[0] in _SHELLS_OWN and words not in _ALIKE else words
