"Files: whole or not at all, whoever dies while writing; what is broken or of another type is named."
import os, signal, subprocess, sys
import pyarrow as pa, pyarrow.parquet as pq, pytest
from hypothesis import given, settings, strategies as st
from cs_clip.files import CSClipError, atomic_write, field, file_digest, read_json, read_shard, shard_paths, write_shard, write_text

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
