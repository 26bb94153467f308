"""Programs that answer many questions from copies of one process, which has imported everything once."""

from __future__ import annotations

# The end of a copy, behind the `try:` of what it does, eight spaces deep: its exit code is a process's own.
ENDS = """\
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""
