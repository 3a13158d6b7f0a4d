"""Export a bf16 model to OpenVINO's format without touching its weights.

    /tmp/peers/openvino/bin/python benchmarks/peers/export_openvino.py MODEL_FOLDER OUTPUT_FOLDER

Runs in the peer's own environment. `optimum-cli export openvino` can't do it: above a billion parameters it quantises
to int8 unless it is told a format, and the formats that keep floats are fp16 and fp32.
"""

import argparse
from pathlib import Path

import openvino
from optimum.exporters.openvino import main_export
from optimum.intel.openvino.configuration import OVConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    partial = arguments.output.with_name(f"{arguments.output.name}.partial")  # so that half an export is none
    main_export(
        str(arguments.model),
        output=partial,
        task="text-generation-with-past",
        ov_config=OVConfig(),  # says neither a format nor a quantisation; None would let the size decide
        convert_tokenizer=True,
    )
    check_weights(partial / "openvino_model.xml")
    partial.rename(arguments.output)


def check_weights(path: Path) -> None:
    """Raises SystemExit where a matrix is not bf16: the comparison would not be one."""
    model = openvino.Core().read_model(path)
    found = {
        operation.get_element_type().get_type_name()
        for operation in model.get_ops()
        if operation.get_type_name() == "Constant" and len(operation.shape) == 2 and min(operation.shape) > 64
    }
    if found != {"bf16"}:
        raise SystemExit(f"{path}: the weights are {sorted(found)}, not bf16")


if __name__ == "__main__":
    main()
