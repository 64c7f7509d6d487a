"""What `code_tests` runs in the sandbox when a test is asserts: the answer, then the asserts, then the secret is told.

It stands alone: it is copied into the private folder, beside `solution.py`, `asserts.py` and the secret, which is gone
before the answer runs. The answer is a module `solution`, so what it does only as a program is left out; the asserts see
its names.
"""

import contextlib
import linecache
import os
import sys
import types


def _read(name: str) -> str:
    with open(name, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    os.remove(name)
    return text


def _was_raised_by_the_answer(error: BaseException) -> bool:
    place = error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == "solution.py":
            return True
        place = place.tb_next
    return False


def _judge() -> None:
    secret, solution, asserts = _read("secret"), _read("solution.py"), _read("asserts.py")
    linecache.cache["solution.py"] = (len(solution), None, solution.splitlines(keepends=True), "solution.py")
    module = types.ModuleType("solution")
    sys.modules["solution"] = sys.modules["__main__"] = module
    with contextlib.suppress(SystemExit):  # what it has defined by then is judged
        exec(compile(solution, "solution.py", "exec"), module.__dict__)
    module.__name__ = "__main__"
    try:
        exec(compile(asserts, "asserts.py", "exec"), module.__dict__)
    except SystemExit as error:  # as `unittest.main` ends
        if error.code not in (None, 0) or _was_raised_by_the_answer(error):
            sys.exit(1)
    sys.stdout.flush()
    os.write(2, secret.encode())


_judge()
