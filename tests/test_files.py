"Files: whole or not at all, whoever dies while writing; what is broken or of another type is named."
import contextlib, errno, os, resource, signal, subprocess, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq, pytest
from hypothesis import given, settings, strategies as st
from cs_clip.files import (CSClipError, atomic_write, clear_shards, field, file_digest, local_folder, read_json, read_json_lines, read_lines, read_shard,
                           shard_paths, write_json, write_json_lines, write_shard, write_text)

WRITER = '''
import sys, time
from cs_clip.files import atomic_write
with atomic_write(sys.argv[1]) as part:
    part.write_text('half')
    print('writing', flush=True)
    time.sleep(60)
'''

@pytest.fixture
def writer(tmp_path):
    "A process in the midst of writing `[note].txt`."
    process = subprocess.Popen([sys.executable, '-c', WRITER, tmp_path/'[note].txt'], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'writing\n'
    yield process
    process.kill()
    process.wait()

def parts(folder): return [p.name for p in folder.iterdir() if p.suffix == '.part']

def test_what_a_killed_writer_left_goes_with_the_next_write(writer, tmp_path):
    (tmp_path/'.other.txt.x.part').write_text('')
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert len(parts(tmp_path)) == 2
    write_text(tmp_path/'[note].txt', 'whole')
    assert parts(tmp_path) == ['.other.txt.x.part'] and (tmp_path/'[note].txt').read_text() == 'whole'

def test_the_part_of_a_living_writer_stays(writer, tmp_path):
    for _ in range(2): write_text(tmp_path/'[note].txt', 'whole')
    assert len(parts(tmp_path)) == 1
    with atomic_write(tmp_path/'[note].txt'):
        write_text(tmp_path/'[note].txt', 'within')
        assert len(parts(tmp_path)) == 2

SCHEMA = pa.schema({'caption': pa.string()})

@contextlib.contextmanager
def small_disk():
    "Within, no file can grow beyond 20 kB: the system's own refusal, as of a full disk. Around one call alone: pytest itself may write to a file."
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try: yield
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

@pytest.mark.parametrize('write', [
    lambda path: write_text(path, 'a cat'*9999), lambda path: write_json(path, ['a cat']*9999),
    lambda path: write_shard(path, [{'caption': os.urandom(20).hex()} for _ in range(2000)], SCHEMA, 'abc')])
def test_what_does_not_fit_changes_nothing(tmp_path, write):
    (tmp_path/'x').write_text('as it was')
    with pytest.raises(CSClipError) as e, small_disk(): write(tmp_path/'x')
    assert str(e.value) == (f'{tmp_path}/x: cannot be written (File too large); nothing was changed: '
                            'make room or choose another folder, and start again')
    assert [p.name for p in tmp_path.iterdir()] == ['x'] and (tmp_path/'x').read_text() == 'as it was'

@pytest.mark.parametrize('code', [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_takes_nothing_is_named(tmp_path, monkeypatch, code):
    def refuse(*_, **__): raise OSError(code, os.strerror(code))
    monkeypatch.setattr('tempfile.mkstemp', refuse)
    with pytest.raises(CSClipError, match=rf'x: cannot be written \({os.strerror(code)}\); choose a folder you may'): write_text(tmp_path/'x', 'a')
    (tmp_path/'file').touch()
    with pytest.raises(CSClipError, match=r'file/x: cannot be written \((File exists|Not a directory)\)'): write_text(tmp_path/'file/x', 'a')

@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CSClipError, match=r'x: cannot be written \(Permission denied\); choose a folder'): write_text(tmp_path/'x', 'a')

def test_a_folder_is_told_from_a_hubs_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'models/mlm').mkdir(parents=True)
    (tmp_path/'bert').touch()
    assert local_folder('models/mlm') == Path('models/mlm') and local_folder(tmp_path) == tmp_path
    assert local_folder('bert') is local_folder('org/bert') is None

def test_lines_come_one_at_a_time(tmp_path):
    path = tmp_path/'x.txt'
    path.write_bytes(b'\xef\xbb\xbfone\r\ntwo\x0c\xe2\x80\xa8still two\n\n\xff')
    lines = read_lines(path)
    assert [next(lines) for _ in range(3)] == [(1, 'one'), (2, 'two\x0c\u2028still two'), (3, '')]
    with pytest.raises(CSClipError, match='x.txt: line 4: no UTF-8 text at byte 0; save the file as UTF-8'): next(lines)
    with pytest.raises(CSClipError, match='cannot be read'): next(read_lines(tmp_path))

@pytest.mark.parametrize('line, said', [('{"a": ', 'broken JSON at line 3'), ('{"a": 1, "a": 2}', 'line 3: "a" comes twice'),
    ('[' * 100_000, 'broken JSON at line 3'), ('9' * 5000, 'broken JSON at line 3')])
def test_a_broken_line_is_named(tmp_path, line, said):
    (tmp_path/'x.jsonl').write_text(f'{{"a": 1}}\n\n{line}')
    values = read_json_lines(tmp_path/'x.jsonl')
    assert next(values) == (1, {'a': 1})
    with pytest.raises(CSClipError, match=f'x.jsonl: {said}'): next(values)

def test_parts_are_no_content(tmp_path):
    write_text(tmp_path/'a/note.txt', 'whole')
    before = file_digest(tmp_path)
    (tmp_path/'a/.note.txt.x.part').write_text('half')
    assert file_digest(tmp_path) == before
    (tmp_path/'a/b.part').write_text('somebody calls a file so')
    assert file_digest(tmp_path) != before

def test_git_and_dvc_ignore_parts(tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    assert subprocess.run(['git', 'check-ignore', 'figures/.figure1.png.x.part'], cwd=root, capture_output=True).returncode == 0
    assert subprocess.run([sys.executable, '-m', 'dvc', 'check-ignore', 'artifacts/train/.checkpoint.pt.x.part'],
                          cwd=root, capture_output=True).returncode == 0

@pytest.mark.parametrize('text', ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "x": 2, "a": 1}}]'])
def test_a_key_that_comes_twice(tmp_path, text):
    (tmp_path/'x.json').write_text(text)
    with pytest.raises(CSClipError, match='x.json: "a" comes twice'): read_json(tmp_path/'x.json')

values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=4)

@settings(deadline=None)
@given(values, st.sampled_from([str, int, (int, float), list, dict]))
def test_a_field_is_of_its_type_or_refused_by_name(value, kind):
    if isinstance(value, kind) and not isinstance(value, bool): assert field({'k': value}, 'k', kind, 'x.json: item 3') is value
    else:
        with pytest.raises(CSClipError, match='^x.json: item 3: "k" is .*; expected (text|an? )'): field({'k': value}, 'k', kind, 'x.json: item 3')
    with pytest.raises(CSClipError, match='item 3: no key "z"'): field(value, 'z', kind, 'x.json: item 3')

def torn(path): path.write_bytes(path.read_bytes()[:-9])
def damaged(path): # within the data: the footer still reads
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
def empty(path): path.write_bytes(b'')
def gone(path): path.unlink()
def foreign(path): pq.write_table(pa.table({'x': [1]}), path)

@pytest.mark.parametrize('harm', [torn, damaged, empty, gone, foreign])
def test_a_shard_that_cannot_be_read_is_named(tmp_path, harm):
    path = tmp_path/'part-00000.parquet'
    write_shard(path, [{'caption': f'a cat {i}'} for i in range(99)], pa.schema({'caption': pa.string()}), 'abc')
    assert len(read_shard(path, ['caption'], 'parse')) == 99 and shard_paths(tmp_path, 'parse') == [path]
    harm(path)
    with pytest.raises(CSClipError, match='part-00000.parquet: .*parse stage'): read_shard(path, ['caption'], 'parse')
    with pytest.raises(CSClipError, match='none: no part.*run the parse stage first'): shard_paths(tmp_path/'none', 'parse')

def test_other_shards_go_and_strangers_stay(tmp_path):
    for n in range(3): write_shard(tmp_path/f'part-0000{n}.parquet', [{'caption': str(n)}], SCHEMA, f'run {n}')
    (tmp_path/'part-00003.parquet').write_bytes(b'PAR1 torn')
    pq.write_table(pa.table({'mine': [1]}), tmp_path/'part-00004.parquet')
    clear_shards(tmp_path, [tmp_path/'part-00001.parquet'])
    assert sorted(p.name for p in tmp_path.iterdir()) == ['part-00001.parquet', 'part-00004.parquet']

def test_json_lines_come_back_and_are_written_whole(tmp_path):
    rows = [{'caption': 'a café'}, ['x'], 3]
    assert write_json_lines(tmp_path/'x.jsonl', iter(rows)) == 3
    assert [item for _, item in read_json_lines(tmp_path/'x.jsonl')] == rows
    def dies():
        yield 'a cat'
        raise RuntimeError
    with pytest.raises(RuntimeError): write_json_lines(tmp_path/'x.jsonl', dies())
    assert [item for _, item in read_json_lines(tmp_path/'x.jsonl')] == rows
