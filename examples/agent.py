"""An agent's loop: a model (here a script) asks for code to be run, and sees what came of it."""

import k8e

SCRIPT = ["n = 10", "sum(k * k for k in range(n + 1)) / 0", "sum(k * k for k in range(n + 1))"]


def model(messages: list[str]) -> str | None:
    """The code to run next, or None when the model has its answer; ask a real one here."""
    return SCRIPT[len(messages) - 1] if len(messages) <= len(SCRIPT) else None


messages = ["What is the sum of the first ten squares?"]
with k8e.Sandbox() as sb, sb.context() as context:
    while code := model(messages):
        done = context.run(code)
        messages.append(done.error.value if done.error else done.text or done.stdout)
print(messages)
