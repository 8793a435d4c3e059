"""Files that editors on Windows wrote: a byte order mark hides nothing."""

from ctrans.base.given_files import read_json, read_lines, read_toml


def test_text_with_a_byte_order_mark_is_read_whole(tmp_path):
    contents = {"a.toml": "width = 8\n", "a.json": '{"width": 8}', "a.jsonl": '{"step": 1}\n'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert read_toml(tmp_path / "a.toml") == {"width": 8}
    assert read_json(tmp_path / "a.json") == {"width": 8}
    assert list(read_lines(tmp_path / "a.jsonl")) == ['{"step": 1}\n']
