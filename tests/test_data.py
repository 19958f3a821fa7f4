import io, json, multiprocessing, pickle, shutil, tarfile, tracemalloc, zipfile
import pyarrow as pa, pyarrow.parquet as pq, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from cs_clip.data import FORMATS, CaptionRows, ImageStore, Pixels, batch_indices, load_supervision, read_karpathy, step_rng
from cs_clip.files import CSClipError
from tiny_clip import png


# ---- Karpathy's file
def entry(i, **more):
    return {'filepath': 'train', 'filename': f'{i}.png', 'imgid': i, 'split': 'train',
            'sentences': [{'raw': f'picture {i}', 'tokens': [], 'sentid': i, 'imgid': i}], **more}

def written(folder, *images):
    (folder/'dataset.json').write_text(json.dumps({'images': images}))
    return folder/'dataset.json'


def test_records_keep_the_files_order_and_unicode(tmp_path):
    sentences = [{'raw': ' 🐈  кот\n', 'sentid': 5}, {'raw': 'a cat', 'sentid': 4}]
    records = read_karpathy(written(tmp_path, entry(2, sentences=sentences), entry(1), entry(3, split='val')), 'train')
    assert [r.image for r in records] == ['train/2.png', 'train/1.png']
    assert records[0].captions == ('🐈 кот', 'a cat') and records[0].sentids == (5, 4)
    assert records.skipped == {}


def test_empty_captions_are_counted(tmp_path):
    sentences = [{'raw': raw, 'sentid': i} for i, raw in enumerate(('', ' \n', 'a cat'), 10)]
    records = read_karpathy(written(tmp_path, entry(1, sentences=sentences), entry(2, sentences=[])), 'train')
    assert records.skipped == {'empty caption': 2, 'image without a caption': 1} and len(records) == 1


def test_flickrs_file_has_no_folders(tmp_path):
    image = entry(1)
    del image['filepath']
    assert read_karpathy(written(tmp_path, image), 'train')[0].image == '1.png'


@pytest.mark.parametrize('images, message', [
    ([entry(1), {k: v for k, v in entry(2).items() if k != 'filename'}], r'images\[1\].*"filename"'),
    ([{k: v for k, v in entry(2).items() if k != 'split'}], r'images\[0\].*"split"'),
    ([entry(7, sentences=[{'raw': 'a cat'}])], r'train/7.png.*"sentid"'),
    ([entry(7, sentences=[{'sentid': 1}])], r'train/7.png.*"raw"'),
    ([entry(7, sentences=[{'sentid': 1, 'raw': 3}])], r'train/7.png\), sentences\[0\]: "raw" is 3; expected text'),
    ([entry(7, sentences=[{'sentid': '1', 'raw': 'a cat'}])], '"sentid" is "1"; expected a whole number'),
    ([entry(1), entry(1)], r'images\[1\] \(train/1.png\).*twice'),
    ([entry(1), entry(2, sentences=[{'sentid': 1, 'raw': 'a'}])], 'sentid 1.*twice'),
    (['x'], 'images'), ([], 'no split "train"')])
def test_bad_files_name_file_and_item(tmp_path, images, message):
    path = written(tmp_path, *images)
    with pytest.raises(CSClipError, match=message) as e: read_karpathy(path, 'train')
    assert str(path) in str(e.value)


@pytest.mark.parametrize('value', [None, 3, True, 'x', [], ['train'], {}])
@pytest.mark.parametrize('key', ['images', 'split', 'filepath', 'filename', 'sentences', 'sentence', 'raw', 'sentid'])
def test_a_value_of_another_type_is_refused_by_name(tmp_path, key, value):
    "Whatever stands in the file, it is read or refused with the file's name; no other error."
    image = entry(1)
    if key in ('raw', 'sentid'): image['sentences'][0][key] = value
    elif key == 'sentence': image['sentences'] = [value]
    else: image[key] = value
    (tmp_path/'dataset.json').write_text(json.dumps({'images': value if key == 'images' else [image]}))
    try: records = read_karpathy(tmp_path/'dataset.json', 'train')
    except CSClipError as e: assert str(tmp_path/'dataset.json') in str(e)
    else: assert all(isinstance(x, str) for r in records for x in (r.image, *r.captions)) and all(type(i) is int for r in records for i in r.sentids)


def test_unknown_split_lists_those_there(tmp_path):
    with pytest.raises(CSClipError, match='"dev"; it has train'): read_karpathy(written(tmp_path, entry(1)), 'train+dev')


# ---- captions as a stream
def lines(*items): return ''.join(json.dumps(item, ensure_ascii=False) + '\n' for item in items)

def captions(path, content, **given):
    "The rows of a file of that content: text, bytes, or a table's columns."
    if isinstance(content, dict): pq.write_table(pa.table(content), path, row_group_size=2)
    else: path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return CaptionRows(path, **given)


WORDS = st.text(st.characters(exclude_categories=['Cs', 'Cc']), max_size=9).map(lambda s: ' '.join(s.split()))

@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-2**63, 2**63 - 1), st.sampled_from(['', 'train/1.png', '2.png']), WORDS), min_size=1, max_size=7))
def test_one_content_is_read_alike_from_every_format(tmp_path_factory, rows):
    folder, wanted = tmp_path_factory.mktemp('alike'), [row for row in rows if row[2]]
    sentids, images, texts = map(list, zip(*rows))
    plain = [(n, '', c) for n, (*_, c) in enumerate(rows, 1) if c]
    named = {'caption': texts, 'sentid': pa.array(sentids, pa.int64()), 'image': images}
    given = {'a.txt': '\n'.join(texts) + '\n'*(not texts[-1]), 'b.txt': '\r\n'.join(texts) + '\r\n',
             'a.jsonl': lines(*({'caption': c} for c in texts)),
             'b.jsonl': lines(*({'caption': c, 'id': i, 'image': image} for i, image, c in rows)),
             'a.parquet': {'caption': texts, 'url': texts}, 'b.parquet': named,
             'c.parquet': {**named, 'caption': pa.array(texts, pa.large_string()).dictionary_encode(), 'image': [i or None for i in images]}}
    for name, content in given.items():
        read, expected = captions(folder/name, content), wanted if name in ('b.jsonl', 'b.parquet', 'c.parquet') else plain
        for _ in range(2): # every loop begins anew
            if not expected:
                with pytest.raises(CSClipError, match=f'{name}: no caption in it; expected'): list(read)
            else: assert list(read) == expected and read.skipped.total() == len(rows) - len(expected), name


def test_a_karpathy_files_captions(tmp_path):
    sentences = [{'raw': raw, 'sentid': i} for i, raw in enumerate(('a  cat', '', 'a dog', 'a bird'))]
    path = written(tmp_path, entry(1, sentences=sentences), entry(7), entry(9, split='val'), entry(8, sentences=[]))
    rows = CaptionRows(path)
    assert list(rows) == [(0, 'train/1.png', 'a cat'), (2, 'train/1.png', 'a dog'), (3, 'train/1.png', 'a bird'), (7, 'train/7.png', 'picture 7')]
    assert rows.skipped == {'empty caption': 1, 'image without a caption': 1}
    first = list(CaptionRows(path, 'train+val', per_image=1))
    assert first == [(0, 'train/1.png', 'a cat'), (7, 'train/7.png', 'picture 7'), (9, 'train/9.png', 'picture 9')]


GOOD = lines({'caption': 'a cat', 'id': 1, 'image': 'train/1.png'})

@pytest.mark.parametrize('name, content, message, before', [
    ('x.jsonl', GOOD + '{"caption": "a d', r'x.jsonl: broken JSON at line 2 \(Unterminated string', 1),
    ('x.jsonl', GOOD + '\n' + lines({'text': 'a dog', 'id': 2}), 'line 3: no key "caption"; expected text', 1),
    ('x.jsonl', GOOD + lines({'caption': None, 'id': 2}), 'line 2: "caption" is null; expected text', 1),
    ('x.jsonl', GOOD + lines(['a dog']), 'line 2: no key "caption"', 1),
    ('x.jsonl', GOOD + lines({'caption': 'a dog'}), 'line 2: no id; expected id', 1),
    ('x.jsonl', lines({'caption': 'a cat'}, {'caption': 'a dog', 'sentid': 3}), 'line 2: sentid; expected none', 1),
    ('x.jsonl', lines({'caption': 'a cat', 'id': '7'}), 'line 1: "id" is "7"; expected a whole number', 0),
    ('x.jsonl', lines({'caption': 'a cat', 'id': 2**63}), 'line 1: "id" is 9223372036854775808; expected a whole number of 64 bits', 0),
    ('x.jsonl', lines({'caption': 'a cat', 'image': 7}), 'line 1: "image" is 7; expected text', 0),
    ('x.jsonl', '{"caption": "a cat \\ud83d"}', 'line 1: "caption" holds a lone surrogate', 0),
    ('x.jsonl', GOOD.encode() + b'{"caption": "\xff"}', 'line 2: no UTF-8 text at byte 13', 1),
    ('x.txt', b'a cat\na dog\n\xe9t\xe9\n', 'x.txt: line 3: no UTF-8 text at byte 0; save the file as UTF-8', 2),
    ('x.txt', 'a cat'.encode('utf-16'), 'line 1: no UTF-8', 0), *((f'x{suffix}', ' \n\n', 'no caption in it', 0) for suffix in ('.txt', '.jsonl')),
    ('x.txt', '', 'x.txt: no caption in it; expected a caption a line', 0), ('x.json', '{"images": [', 'broken JSON at line 1', 0),
    ('x.json', json.dumps({'images': [entry(1, sentences=[])]}), 'no caption in it', 0), ('x.json', '{"images": []}', 'no split "train"', 0),
    ('x.json', json.dumps({'images': [entry(1, sentences=[{'raw': '\ud83d', 'sentid': 1}])]}), r'sentences\[0\]: "raw" holds a lone surrogate', 0),
    ('x.parquet', b'PAR1 half', 'x.parquet: no readable Parquet file', 0), ('x.parquet', {'text': ['a cat']}, 'no column "caption"; it has text', 0),
    ('x.parquet', {'caption': [1]}, 'column "caption" is int64; expected text', 0),
    ('x.parquet', {'caption': ['a'], 'id': [1.]}, 'column "id" is double; expected whole numbers', 0),
    ('x.parquet', {'caption': ['a'], 'image': [{'bytes': b''}]}, 'column "image" is struct<bytes: binary>; expected text', 0),
    ('x.parquet', {'caption': ['a', 'b', None]}, 'row 3: "caption" is null; expected text', 2),
    ('x.parquet', {'caption': ['a', 'b', 'c'], 'id': [1, 2, None]}, 'row 3: "id" is null; expected a whole number', 2)])
def test_bad_captions_name_file_and_place(tmp_path, name, content, message, before):
    rows = iter(captions(tmp_path/name, content))
    for _ in range(before): next(rows)
    with pytest.raises(CSClipError, match=message) as e: next(rows)
    assert str(e.value).startswith(str(tmp_path/name)) and '\n' not in str(e.value)


def test_a_damaged_parquet_file_gives_what_lies_before_the_damage(tmp_path):
    captions(tmp_path/'x.parquet', {'caption': [f'a cat {i}' for i in range(5000)]})
    data = bytearray((tmp_path/'x.parquet').read_bytes())
    data[len(data)//3:len(data)//3 + 500] = bytes(500)
    with pytest.raises(CSClipError, match=r'x.parquet: no readable Parquet file after row \d+ \('): list(captions(tmp_path/'x.parquet', bytes(data)))


def test_files_that_are_none(tmp_path):
    for name in ('x.csv', 'x', 'x.txt.gz'):
        with pytest.raises(CSClipError, match=rf'{name}: unknown suffix .* expected one of \.txt \(a caption a line\), .*{list(FORMATS)[-1]}'):
            captions(tmp_path/name, 'a cat')
    assert list(captions(tmp_path/'X.TXT', 'a cat')) == [(1, '', 'a cat')]
    (tmp_path/'folder.txt').mkdir()
    for name, why in (('none.txt', 'No such file'), ('folder.txt', 'Is a directory')):
        with pytest.raises(CSClipError, match=f'{name}: cannot be read .{why}.*expected one of'): CaptionRows(tmp_path/name)


@pytest.mark.parametrize('suffix', ['txt', 'jsonl', 'parquet'])
def test_a_stream_holds_a_piece_of_the_file_alone(tmp_path, suffix):
    "What Python allocates does not grow with the file; Arrow's memory lies outside, and is bounded by its buffer."
    texts = [f'a red cat number {i} on a mat' for i in range(40_000)]
    content = {'txt': '\n'.join(texts), 'jsonl': lines(*({'caption': c} for c in texts)), 'parquet': {'caption': texts}}[suffix]
    rows, before = captions(tmp_path/f'x.{suffix}', content), pa.total_allocated_bytes()
    del content
    tracemalloc.start()
    try: assert sum(1 for _ in rows) == len(texts) and tracemalloc.get_traced_memory()[1] < 1_500_000
    finally: tracemalloc.stop()
    assert pa.total_allocated_bytes() - before < 1_000_000


# ---- generated supervision
def rows(sentid, image='train/1.png', n=1):
    foils = [{'kind': 'replace_obj', 'text': f'a dog {k}'} for k in range(n)]
    return {'sentid': sentid, 'image': image, 'caption': f'a cat {sentid}', 'negatives': foils, 'shuffled': None}

def shard(folder, name, *items): pq.write_table(pa.Table.from_pylist(list(items)), folder/name)


def test_supervision_gathers_an_images_captions(tmp_path):
    shard(tmp_path, 'part-1.parquet', rows(3), rows(4, 'train/2.png', 0))
    shard(tmp_path, 'part-0.parquet', rows(1), rows(2, n=2))
    records = load_supervision(tmp_path)
    assert [r.image for r in records] == ['train/1.png', 'train/2.png']
    assert records[0].sentids == (1, 2, 3) and [len(n) for n in records[0].negatives] == [1, 2, 1]
    assert records[0].negatives[1][0] == ('replace_obj', 'a dog 0')
    assert load_supervision(tmp_path).digest == records.digest


def test_bad_supervision(tmp_path):
    shard(tmp_path, 'part-0.parquet', rows(1), rows(1))
    with pytest.raises(CSClipError, match='sentid 1.*twice'): load_supervision(tmp_path)
    shard(tmp_path, 'part-0.parquet', {'sentid': 1})
    with pytest.raises(CSClipError, match='no column image'): load_supervision(tmp_path)
    (tmp_path/'part-0.parquet').write_bytes(b'PAR1 half')
    with pytest.raises(CSClipError, match='part-0.parquet'): load_supervision(tmp_path)


# ---- pictures
def packed(folder, kind, members):
    path = folder/f'train.{kind}'
    if kind == 'zip':
        with zipfile.ZipFile(path, 'w') as z:
            for name, data in members.items(): z.writestr(name, data)
    else:
        with tarfile.open(path, 'w') as t:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                t.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize('kind', ['zip', 'tar'])
@pytest.mark.parametrize('member', ['train/1.png', '1.png', './train/1.png'])
def test_archives_are_read_in_place(tmp_path, kind, member):
    if kind == 'zip' and member[0] == '.': pytest.skip('only tar writes such names')
    path = packed(tmp_path, kind, {member: png('red'), 'train/2.png': png('blue')})
    assert ImageStore(tmp_path).open('train/1.png').getpixel((0, 0)) == (255, 0, 0)
    assert ImageStore(path).open('1.png').getpixel((0, 0)) == (255, 0, 0)
    assert 'val/1.png' not in ImageStore(path) or member == '1.png'
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


def test_pictures_are_named_by_their_bytes_however_they_are_packed(tmp_path):
    members, store = {f'train/{i}.png': png('red', (4, 4 + i)) for i in range(3)}, lambda kind: ImageStore(tmp_path/kind)
    for kind in ('loose', 'zip', 'tar'): (tmp_path/kind/'train').mkdir(parents=True)
    for name, data in members.items(): (tmp_path/'loose'/name).write_bytes(data)
    shutil.make_archive(tmp_path/'zip/train', 'zip', tmp_path/'loose', 'train')
    shutil.make_archive(tmp_path/'tar/train', 'tar', tmp_path/'loose', 'train')
    digests = {store(kind).digest(list(members)) for kind in ('loose', 'zip', 'tar')}
    assert len(digests) == 1 and digests != {store('zip').digest(list(members)[:2])}
    (tmp_path/'loose/train/2.png').write_bytes(members['train/2.png'][:-1] + b'x')  # as many bytes as before
    assert store('loose').digest(list(members)) not in digests
    with pytest.raises(CSClipError, match='no image "train/9.png"'): store('zip').digest(['train/9.png'])


def encoded(image, format, **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()

def test_every_mode_becomes_rgb(tmp_path):
    red = Image.new('RGB', (8, 4), 'red')
    exif = red.getexif()
    exif[274] = 6  # turned by 90 degrees
    palette = red.convert('P')
    pictures = {'cmyk.jpg': encoded(red.convert('CMYK'), 'jpeg', quality=95), 'palette.png': encoded(palette, 'png', transparency=3),
        'alpha.png': encoded(red.convert('RGBA'), 'png'), 'grey.png': encoded(red.convert('L'), 'png'), 'bits.png': encoded(red.convert('1'), 'png'),
        'turned.jpg': encoded(red, 'jpeg', exif=exif, quality=95)}
    for name, data in pictures.items(): (tmp_path/name).write_bytes(data)
    store = ImageStore(tmp_path)
    assert all(store.open(name).mode == 'RGB' for name in pictures)
    assert store.open('turned.jpg').size == (4, 8)
    assert all(abs(a - b) < 6 for a, b in zip(store.open('cmyk.jpg').getpixel((0, 0)), (255, 0, 0)))


@pytest.mark.parametrize('data', [b'', b'no image', png('red', (64, 64))[:90], png('red')[:40]])
def test_broken_pictures_are_named(tmp_path, data):
    (tmp_path/'1.png').write_bytes(data)
    packed(tmp_path, 'zip', {'train/2.png': data})
    store = ImageStore(tmp_path)
    for name in ('1.png', 'train/2.png'):
        with pytest.raises(CSClipError, match=f'{name}.*truncated') as e: store.open(name)
        assert str(tmp_path) in str(e.value)
    with pytest.raises(CSClipError, match='no image "train/3.png"'): store.open('train/3.png')


def test_broken_archives_and_roots(tmp_path):
    with pytest.raises(CSClipError, match='expected a folder'): ImageStore(tmp_path/'none')
    for suffix in ('zip', 'tar'):
        (tmp_path/f'train.{suffix}').write_bytes(b'half an archive')
        with pytest.raises(CSClipError, match=f'train.{suffix}'): ImageStore(tmp_path/f'train.{suffix}').open('1.png')


def _pixel(store, name, queue): queue.put(store.open(name).getpixel((0, 0)))

@pytest.mark.parametrize('kind', ['zip', 'tar'])
@pytest.mark.parametrize('start', ['fork', 'spawn'])
def test_stores_go_to_other_processes(tmp_path, kind, start):
    store = ImageStore(packed(tmp_path, kind, {'1.png': png('red'), '2.png': png('blue')}))
    store.open('1.png')
    context = multiprocessing.get_context(start)
    queue = context.Queue()
    process = context.Process(target=_pixel, args=(store, '2.png', queue))
    process.start()
    assert queue.get(timeout=60) == (0, 0, 255)
    process.join()
    assert pickle.loads(pickle.dumps(store)).open('2.png').getpixel((0, 0)) == (0, 0, 255)


def test_kept_pixels_are_the_decoded_ones(tmp_path):
    for i, color in enumerate(('red', 'blue')): (tmp_path/f'{i}.png').write_bytes(png(color, (2, 2)))
    as_tensor = lambda image: torch.tensor(image.getpixel((0, 0))).float()
    kept, fresh = Pixels(ImageStore(tmp_path), as_tensor, keep=True), Pixels(ImageStore(tmp_path), as_tensor)
    names = ['1.png', '0.png', '1.png']
    assert kept(names).equal(fresh(names)) and kept(names).shape == (3, 3)
    for path in tmp_path.iterdir(): path.unlink()
    assert kept(names).shape == (3, 3)
    with pytest.raises(CSClipError): fresh(names)


# ---- batches
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5))
def test_every_item_comes_once_an_epoch(n, batch, seed):
    seen = sum((batch_indices(n, batch, seed, step) for step in range(n)), [])  # n batches are `batch` epochs
    for epoch in range(batch): assert sorted(seen[epoch*n:(epoch + 1)*n]) == list(range(n))


def test_batches_depend_on_seed_and_step_alone():
    assert batch_indices(100, 8, 1, 30) == batch_indices(100, 8, 1, 30) != batch_indices(100, 8, 2, 30)
    assert step_rng(1, 2).random() == step_rng(1, 2).random() != step_rng(1, 3).random()


def test_concepts_are_read_as_they_were_written(tmp_path):
    from cs_clip.concepts import concepts_file
    from cs_clip.data import load_concepts
    from cs_clip.parsing import parse_file
    rows = [(1, 'train/1.png', 'A red mug on the table'), (2, 'train/2.png', 'It is very dark outside'), (3, 'train/1.png', 'the red mug')]
    parse_file(rows, tmp_path/'parse', shard_size=2)
    assert concepts_file(tmp_path/'parse', tmp_path/'concepts') == {'captions': 3, 'concepts': 4, 'distinct': 3, 'whole captions': 1}
    before = {p: p.stat().st_mtime_ns for p in (tmp_path/'concepts').iterdir()}
    records = load_concepts(tmp_path/'concepts')
    assert [(r.image, r.captions, r.concepts) for r in records] == [
        ('train/1.png', ('A red mug on the table', 'the red mug'), (('red mug', 'table'), ('red mug',))),
        ('train/2.png', ('It is very dark outside',), (('It is very dark outside',),))]
    concepts_file(tmp_path/'parse', tmp_path/'concepts')
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path/'concepts').iterdir()}  # whole shards are kept
    concepts_file(tmp_path/'parse', tmp_path/'concepts', 'noun')
    other = load_concepts(tmp_path/'concepts')
    assert other[0].concepts[0] == ('mug', 'table') and other.digest != records.digest
