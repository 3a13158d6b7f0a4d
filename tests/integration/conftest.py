from tests.model.conftest import write_checkpoint

__all__ = ["write_checkpoint"]
