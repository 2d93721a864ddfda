# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import textwrap

import pytest
import trl
import trl.trainer.grpo_trainer

from trl_consistent import ConsistentGRPOConfig, ConsistentGRPOTrainer, __version__, cli, run


def command(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "trl_consistent.cli", *arguments], capture_output=True, text=True, timeout=300, **kwargs
    )


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert "run" in output and "grpo" in output


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"trl-consistent {__version__}"


def test_no_command_and_a_wrong_one_are_usage_errors(capsys):
    for arguments, message in (([], "COMMAND"), (["trian"], "invalid choice: 'trian'")):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_run_without_a_script_shows_its_usage(capsys):
    assert cli.main(["run"]) == 2 and "usage: trl-consistent run SCRIPT.py" in capsys.readouterr().out
    assert cli.main(["run", "--help"]) == 0


def test_run_of_a_missing_script_says_so(capsys):
    assert cli.main(["run", "nowhere/script.py", "--flag"]) == 2
    assert "No script at 'nowhere/script.py'" in capsys.readouterr().err


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.trainer.grpo_trainer import GRPOTrainer as Deep
from trl.trainer.grpo_config import GRPOConfig as DeepConfig
import sys, helper
assert __name__ == "__main__"
assert Deep is GRPOTrainer and DeepConfig is GRPOConfig
(args,) = TrlParser(GRPOConfig).parse_args_and_config()
print(GRPOTrainer.__name__, type(args).__name__, args.correction, args.vllm_importance_sampling_mode, helper.HERE)
"""


def test_a_script_gets_our_classes_and_nothing_stays_patched(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("HERE = 'beside'")
    before = trl.GRPOTrainer, trl.GRPOConfig, list(sys.argv), list(sys.path)
    options = ["--output_dir", str(tmp_path), "--use_vllm", "--correction", "icepop", "--use_cpu", "--bf16", "False"]
    assert cli.main(["run", str(script), *options]) == 0
    assert capsys.readouterr().out.split() == [
        "ConsistentGRPOTrainer", "ConsistentGRPOConfig", "icepop", "token_mask", "beside"
    ]  # fmt: skip
    assert (trl.GRPOTrainer, trl.GRPOConfig, list(sys.argv), list(sys.path)) == before
    assert trl.trainer.grpo_trainer.GRPOTrainer is before[0]


def test_nothing_stays_patched_when_the_script_fails(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise KeyError('from the script')")
    before = trl.GRPOTrainer, list(sys.argv), list(sys.path)
    with pytest.raises(KeyError, match="from the script"):
        run.run(str(script), [])
    assert (trl.GRPOTrainer, list(sys.argv), list(sys.path)) == before


def test_a_file_missing_inside_the_script_is_the_script_s_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("open('/nonexistent/file')")
    with pytest.raises(FileNotFoundError):
        run.main([str(script)])


def test_the_swap_covers_every_module_a_script_may_import_from():
    with run.swapped():
        assert trl.GRPOTrainer is trl.trainer.GRPOTrainer is ConsistentGRPOTrainer
        assert trl.trainer.grpo_trainer.GRPOTrainer is ConsistentGRPOTrainer
        assert trl.GRPOConfig is ConsistentGRPOConfig


def test_our_options_are_among_the_flags_of_trl_s_script(tmp_path):
    from importlib.resources import files

    done = command("run", str(files("trl.scripts") / "grpo.py"), "--help")
    assert done.returncode == 0, done.stderr
    assert (
        "--correction" in done.stdout
        and "--rollout_engine_kwargs" in done.stdout
        and "--num_generations" in done.stdout
    )


def test_grpo_has_our_options_too():
    done = command("grpo", "--help")
    assert done.returncode == 0, done.stderr
    assert "--correction" in done.stdout and "trl-consistent grpo" in done.stdout


def test_grpo_splits_launch_and_script_arguments(monkeypatch, tmp_path):
    launched = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    config = tmp_path / "grpo.yaml"
    config.write_text(
        textwrap.dedent(
            f"""
            output_dir: {tmp_path}
            use_vllm: true
            correction: tis
            use_cpu: true
            bf16: false
            """
        )
    )
    assert cli.main(["grpo", "--config", str(config), "--num_processes", "2", "--max_steps", "3"]) == 0
    (args,) = launched
    assert args.module and args.training_script == "trl_consistent.run" and args.num_processes == 2
    assert args.training_script_args[0].endswith("trl/scripts/grpo.py")
    assert args.training_script_args[1:] == ["--config", str(config), "--max_steps", "3"]
