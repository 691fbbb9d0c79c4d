# What an interactive bash of a context reads first: no prompt, no history, no word of its own.
# Descriptor 9 is the socket to the guest; cells run without it.
exec 9>&0
set +H
set +o history
unset HISTFILE MAILCHECK
PS1= PS2=
__k8e_cell=
PROMPT_COMMAND='printf "%s %s\n" "$__k8e_cell" "$?" >&9'
