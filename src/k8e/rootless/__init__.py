"""A gateway without root: it is root in a user namespace of its user's own, and nowhere else.

A small process, the *holder*, keeps that namespace and three more: of mounts, of processes and of a
network. It outlives the gateway, so that sandboxes do; a new gateway enters it and finds everything
as it was. When the holder ends, the kernel ends all that is in there.

``ids`` tells which uids a user may have beside its own, ``holder`` makes and finds the holder,
``entering`` moves a process into it, ``tether`` connects its network with the machine's.
"""

from k8e.rootless.enter import NamespaceUser, enter, inside, leave, outer_pid

__all__ = ["NamespaceUser", "enter", "inside", "leave", "outer_pid"]
