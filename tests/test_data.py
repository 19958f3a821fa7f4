import io, json, multiprocessing, pickle, shutil, tarfile, zipfile
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from cs_clip.data import ImageStore, Pixels, batch_indices, load_supervision, read_karpathy, step_rng
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
