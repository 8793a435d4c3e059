"""Code of users, readers who leave, and signals: the object of --json - stands alone, and no
command ends without a word.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest

from ctrans.cli import plugins
from tests.cli.test_commands import run, strict

SMALL = ("--depth", 1, "--width", 16, "--heads", 2, "--context", 16, "--batch", 1)
MODEL = """
import sys
def exits():
    print("loud")
    sys.exit(0)
"""


@pytest.mark.parametrize("code", ["0", "", "3", "'words'"])
def test_a_plugin_that_exits_is_named_with_its_line(code, tmp_path):
    (tmp_path / "plugin.py").write_text(f"import sys\nsys.exit({code})\n")
    result = run("--plugin", tmp_path / "plugin.py", "verify", "--only", "lemma-1", "--cases", 1)
    assert result.exit_code == 2
    assert "plugin.py, line 2: SystemExit" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_plugin_that_changes_the_directory_leaves_the_command_where_it_was(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "plugin.py").write_text(f"import os\nos.chdir({str(elsewhere)!r})\n")
    monkeypatch.chdir(tmp_path)
    given = ("verify", "--only", "lemma-1", "--cases", 1, "--json", "found.json")
    assert run("--plugin", "plugin.py", *given).exit_code == 0
    assert (tmp_path / "found.json").exists()
    assert not list(elsewhere.iterdir())


ERRORS = """
class Ends(BaseException):
    pass
class Mute(Exception):
    def __str__(self):
        raise RuntimeError
def raises():
    raise {error}
"""


@pytest.mark.parametrize("error", ["Ends('now')", "GeneratorExit", "Mute()"])
def test_code_that_raises_any_class_is_named_with_its_line(error, tmp_path):
    (tmp_path / "model.py").write_text(ERRORS.format(error=error))
    result = run("diagnose", "--python", f"{tmp_path / 'model.py'}:raises")
    assert result.exit_code == 2
    assert f"model.py, line 8: {error.partition('(')[0]}" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("error", ["Ends", "Mute"])
def test_a_model_whose_pass_raises_any_class_ends_in_a_line(error, monkeypatch):
    from ctrans.model.gpt import GPT

    classes = {}
    exec(ERRORS.format(error=error), classes)
    monkeypatch.setattr(GPT, "__init__", lambda *args, **options: classes["raises"]())
    result = run("simulate", *SMALL)
    assert result.exit_code == 70
    assert f"please report it: {error}" in result.stderr


def test_a_module_without_a_file_can_be_a_plugin():
    assert run("--plugin", "math", "verify", "--only", "lemma-1", "--cases", 1).exit_code == 0


def test_a_function_that_exits_is_named_with_its_line(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    result = run("diagnose", "--python", f"{tmp_path / 'model.py'}:exits", "--json", "-")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "SystemExit: 0" in result.stderr


def test_prints_of_users_code_do_not_stand_before_the_object(tmp_path):
    (tmp_path / "loud.py").write_text("print('at import')\n")
    result = run("--plugin", tmp_path / "loud.py", "simulate", *SMALL, "--json", "-")
    assert result.exit_code == 0, result.output
    assert strict(result.stdout)["command"] == "simulate"
    assert "at import" in result.stderr


LOUD = """
import atexit, os, sys
def loud(where):
    print(where, "print", flush=True)
    os.write(1, f"{where} descriptor\\n".encode())
    os.system(f"echo {where} process")
    sys.__stdout__.write(f"{where} stream\\n")
    sys.__stdout__.flush()
loud("import")
atexit.register(loud, "exit")
if os.fork() == 0:
    loud("fork")
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
def test_what_users_code_writes_to_the_descriptor_of_stdout_goes_to_stderr(tmp_path):
    (tmp_path / "loud.py").write_text(LOUD)
    options = ["simulate", *map(str, SMALL), "--json", "-"]
    called = [sys.executable, "-m", "ctrans", "--plugin", str(tmp_path / "loud.py"), *options]
    done = subprocess.run(called, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert strict(done.stdout)["command"] == "simulate"
    ways = ("print", "descriptor", "process", "stream")
    assert sorted(done.stderr.splitlines()) == sorted(
        f"{where} {way}" for where in ("import", "fork", "exit") for way in ways
    )


@pytest.mark.slow
def test_no_file_gets_the_number_of_a_closed_stderr(tmp_path):
    (tmp_path / "number.py").write_text(
        "import os\nassert os.path.samestat(os.fstat(2), os.stat(os.devnull))\n"
    )
    command = [
        "sh",
        "-c",
        'exec "$@" 2>&-',
        "sh",
        sys.executable,
        "-m",
        "ctrans",
        "--plugin",
        str(tmp_path / "number.py"),
    ]
    done = subprocess.run(
        [*command, "simulate", *map(str, SMALL), "--json", "-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, strict(done.stdout)["command"]) == (0, "simulate")


@pytest.mark.slow
def test_a_program_that_calls_the_command_has_its_stdout_as_before():
    code = """
import os, sys
from ctrans.cli import main
before = sys.stdout
for options in (["--batch", "1"], ["--depth", "0"]):
    try:
        main(["simulate", "--depth", "1", "--width", "16", "--heads", "2", "--context", "16", "--json", "-", *options])
    except SystemExit as end:
        print("ended", end.code, flush=True)
assert sys.stdout is before
os.system("echo by descriptor")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nended 0\nended 2\nby descriptor\n")


def test_a_model_that_prints_or_exits_in_a_pass(monkeypatch):
    from ctrans.model.gpt import GPT

    make = GPT.__init__

    def loud(self, *args, **options):
        make(self, *args, **options)
        print("in the command")

    monkeypatch.setattr(GPT, "__init__", loud)
    result = run("simulate", *SMALL, "--json", "-")
    assert strict(result.stdout)["command"] == "simulate"
    assert "in the command" in result.stderr
    for code in (0, 3):
        monkeypatch.setattr(GPT, "__init__", lambda *args, code=code, **options: sys.exit(code))
        result = run("simulate", *SMALL, "--json", "-")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "sys.exit" in result.stderr


@pytest.mark.slow
def test_a_signal_while_users_code_runs_is_no_fault_of_that_code(tmp_path):
    (tmp_path / "model.py").write_text(
        "import os, signal, time\ndef slow():\n    os.kill(os.getpid(), signal.SIGTERM)\n   "
        " time.sleep(9)\n"
    )
    command = [
        sys.executable,
        "-m",
        "ctrans",
        "diagnose",
        "--python",
        f"{tmp_path / 'model.py'}:slow",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "ctrans: ended by SIGTERM\n")


def test_an_error_of_syntax_is_named_with_its_line(tmp_path):
    (tmp_path / "model.py").write_text("import sys\ndef build(:\n")
    result = run("diagnose", "--python", f"{tmp_path / 'model.py'}:build")
    assert result.exit_code == 2
    assert f"failed at {tmp_path / 'model.py'}, line 2: SyntaxError" in result.stderr


@pytest.mark.slow
def test_a_reader_who_leaves_is_no_failed_computation(tmp_path):
    command = [sys.executable, "-m", "ctrans", "simulate", *map(str, SMALL), "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 128 + signal.SIGPIPE
    assert (tmp_path / "simulate.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_reader_who_leaves_the_help_ends_it_by_the_signal(option):
    command = [sys.executable, "-m", "ctrans", option]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 128 + signal.SIGPIPE


@pytest.mark.slow
def test_sigterm_ends_a_study_with_a_line_and_no_process_is_left(tmp_path):
    (tmp_path / "long.toml").write_text(
        "learning_rates = [1e-3, 1e-2]\n[base]\ndepth = 1\nwidth = 16\nheads = 2\ncontext ="
        " 8\niterations = 100000\nbatch = 20\n"
    )
    command = [
        sys.executable,
        "-m",
        "ctrans",
        "study",
        str(tmp_path / "long.toml"),
        "--workers",
        "2",
        "--out",
        str(tmp_path / "s"),
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(12)
    process.terminate()
    assert "ctrans: ended by SIGTERM" in process.communicate(timeout=30)[1].splitlines()[-1]
    assert process.returncode == 128 + signal.SIGTERM
    time.sleep(5)  # the tracker of multiprocessing ends a little after
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_the_digest_of_plugins_is_that_of_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "LOADED", {})
    assert plugins.digest_of_plugins() is None
    file = tmp_path / "plugin.py"
    file.write_text("x = 1\n")
    for name in (str(file), "math"):
        plugins.load_plugin(name)
    first = plugins.digest_of_plugins()
    monkeypatch.chdir("/")
    assert first == plugins.digest_of_plugins()
    file.write_text("x = 2\n")
    forget_modules_of(tmp_path)
    plugins.load_plugin(str(file))
    assert plugins.digest_of_plugins() != first


def forget_modules_of(folder):
    """As a new process, which has imported none of them."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def edited(file, text):
    """Gives the file another text of the same size, and keeps its time."""
    times = file.stat()
    assert times.st_size == len(text)
    file.write_text(text)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def digest_and_value(plugin, monkeypatch, folder):
    """The digest of a plugin in a new process, and its `value`."""
    forget_modules_of(folder)
    monkeypatch.setattr(plugins, "LOADED", {})
    plugins.load_plugin(plugin)
    return plugins.digest_of_plugins(), plugins.import_named(plugin).value


FOLDERS = {
    "plug_of_digest.py": ("plug_of_digest.py", "helper_of_digest.py", "helper_of_digest"),
    "plug_of_digest": ("plug_of_digest.py", "helper_of_digest.py", "helper_of_digest"),
    "pack_of_digest": ("pack_of_digest/__init__.py", "pack_of_digest/part.py", ".part"),
}


@pytest.mark.parametrize("named", FOLDERS)
def test_a_plugin_runs_as_it_is_and_its_digest_has_what_it_imports_beside_it(
    named, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    name_of_main, name_of_helper, module = FOLDERS[named]
    main_file, helper = tmp_path / name_of_main, tmp_path / name_of_helper
    main_file.parent.mkdir(exist_ok=True)
    main_file.write_text("import json\nvalue = 1\n")
    alone = digest_and_value(named, monkeypatch, tmp_path)
    of_file = hashlib.sha256(main_file.read_bytes()).digest()
    assert alone == (hashlib.sha256(of_file).hexdigest(), 1)
    edited(main_file, "import json\nvalue = 2\n")
    assert digest_and_value(named, monkeypatch, tmp_path)[1] == 2
    helper.write_text("value = 3\n")
    main_file.write_text(f"from {module} import value\n")
    first = digest_and_value(named, monkeypatch, tmp_path)
    assert first[1] == 3
    assert digest_and_value(named, monkeypatch, tmp_path) == first
    edited(helper, "value = 4\n")
    second = digest_and_value(named, monkeypatch, tmp_path)
    assert second[1] == 4
    assert first[0] != second[0]
    assert not list(tmp_path.rglob("*.pyc"))
    forget_modules_of(tmp_path)


@pytest.mark.slow
def test_a_training_goes_on_with_an_edited_plugin_and_says_so(tmp_path):
    (tmp_path / "plugin.py").write_text("x = 1\n")
    start = [sys.executable, "-m", "ctrans", "--plugin", "plugin.py", "train", "--out", "out"]
    said = []
    for options in ([*map(str, SMALL), "--iterations", "2"], ["--resume", "--iterations", "4"]):
        done = subprocess.run(
            [*start, *options], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        said.append("plugins are not those" in done.stderr)
        (tmp_path / "plugin.py").write_text("x = 2\n")
    assert said == [False, True]
