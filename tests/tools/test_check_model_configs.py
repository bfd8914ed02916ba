"""Test the program that starts published configs: which results count as running and as refused."""

from benchmarks.check_model_configs import read_configs, run


def test_a_config_runs_or_is_refused_with_its_line():
    configs = read_configs()
    assert run(*configs["Falcon 40B (first file)"]) == ("runs", "")
    # This model has experts without gates, stored in FP8.
    assert run(*configs["Nemotron 3 Nano 30B FP8"]) == ("runs", "")
    result, message = run(*configs["MiniMax M3"])
    assert result == "refused" and "not supported" in message


def test_values_that_are_null_in_the_table_are_left_out():
    config, files = read_configs()["Llama 2 7B GPTQ (first file)"]
    assert files["quantize_config.json"]["bits"] == 4 and "quantization_config" not in config
    assert "n_layer" in read_configs()["Falcon 7B (first file)"][0]
    assert "num_hidden_layers" not in read_configs()["Falcon 7B (first file)"][0]
