"""Runs the tests: a process for each module that starts a JVM or a broker, and a verdict that means the code.

`plan` collects once and says what runs in which process, `processes` starts and ends one, `journal` and `hangs` are
pytest plugins inside it, `judge` tells a wrong answer from a failure by time or by the machine, `__main__` is the run.
"""
