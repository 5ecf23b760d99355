import pytest

pytest.register_assert_rewrite("tests.bucket.contract")
