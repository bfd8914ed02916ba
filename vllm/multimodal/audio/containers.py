"""Formats of sounds and videos: recognising them, and checking that they are complete.

FFmpeg reads a truncated file without an error, as far as it goes, so the lengths that a format
declares are compared here with the actual bytes. Decodes nothing.
"""

from collections.abc import Callable

from vllm.multimodal.interface.decoding import IncompleteError

FFMPEG_NAMES = {
    "WAV": "wav",
    "FLAC": "flac",
    "OGG": "ogg",
    "MP3": "mp3",
    "MP4": "mov",
    "WebM": "matroska",
    "AAC": "aac",
}
"""Accepted format -> the only reader of FFmpeg that is asked. MP4 has .m4a and .mov as well, WebM
has .mkv."""

ACCEPTED = "WAV, FLAC, OGG (Vorbis, Opus), MP3, MP4 and M4A, WebM, AAC"

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (8, b"WAVE", "WAV"),
    (0, b"fLaC", "FLAC"),
    (0, b"OggS", "OGG"),
    (4, b"ftyp", "MP4"),
    (0, b"\x1a\x45\xdf\xa3", "WebM"),
    # Formats that are refused; the error names them.
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"GIF8", "GIF"),
    (8, b"WEBP", "WEBP"),
    (8, b"AVI ", "AVI"),
    (0, b"FORM", "AIFF"),
    (0, b"RF64", "RF64"),
    (0, b"#!AMR", "AMR"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "WMA"),
    (0, b".snd", "AU"),
    (0, b"caff", "CAF"),
    (0, b"MThd", "MIDI"),
    (0, b"#EXTM3U", "M3U"),
    (0, b"%PDF", "PDF"),
    (0, b"PK\3\4", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
)
"""Offset, bytes at this offset, format."""
_RIFF = ("WAV", "WEBP", "AVI")
_PICTURES = (b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1", b"avif", b"avis")
"""Brands of the container of MP4 that have pictures."""
_LAYERS = ("AAC", "MP3", "MP2", "MP1")
"""Format by the two bits of an MPEG audio frame that name its layer."""
_MP3_KBITS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_MP3_KBITS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
"""Rates of MPEG 1, and of MPEG 2 and 2.5, by the index in the header of a frame. 0: not known."""
_MP3_RATES = (44_100, 48_000, 32_000)
_MP3_DIVISORS = (4, 0, 2, 1)
"""Divisor of these rates for each value of the version bits: 2.5, none, 2 and 1."""

_UNKNOWN = 2**31 - 2**12
"""Programs that write to a pipe state a size of their own from here on; no file is as large."""
_SEVERAL = "it must be one recording, got several, one after the other"
_OGG_HEADER_BYTES, _OGG_IS_FIRST, _OGG_IS_LAST = 27, 2, 4
_EBML, _SEGMENT, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1F43B675
_GIF_EXTENSION, _GIF_IMAGE = 0x21, 0x2C
_LENGTH_MARKS = (b"Xing", b"Info", b"VBRI")
"""Marks in the first frame of an MP3 file that states how long it is."""
_MARK_BYTES = 256
"""Bytes of that frame among which they are."""


def sniff(data: bytes) -> str | None:
    """Return the format of a file by its first bytes, supported or not; None: unknown.

    >>> sniff(b"RIFF....WAVE"), sniff(b"OggS..."), sniff(b"GIF89a"), sniff(b"?")
    ('WAV', 'OGG', 'GIF', None)
    """
    for offset, signature, name in _SIGNATURES:
        if data.startswith(signature, offset) and (name not in _RIFF or data[:4] == b"RIFF"):
            is_picture = name == "MP4" and data[8:12] in _PICTURES
            return "HEIC or AVIF" if is_picture else name
    begin = _end_of_tags(data)
    if data.startswith(b"fLaC", begin):
        return "FLAC"
    if len(data) > begin + 1 and data[begin] == 0xFF and data[begin + 1] & 0xE0 == 0xE0:
        return _LAYERS[data[begin + 1] >> 1 & 3]
    return "MP3" if begin else None  # other tags or padding follow


def describe(data: bytes) -> str:
    """Return a description, for messages, of a file that is not supported.

    >>> describe(b""), describe(b"GIF89a"), describe(b"?")
    ('an empty file', 'a file of the format GIF', 'a file of an unknown format')
    """
    if not data:
        return "an empty file"
    name = sniff(data)
    return "a file of an unknown format" if name is None else f"a file of the format {name}"


def check_complete(name: str, data: bytes) -> None:
    """Check that a file is not truncated, as far as its structure shows it.

    Args:
        name: name of the format, which must be supported.
        data: content of the file.

    Raises:
        IncompleteError: it is truncated, its parts do not follow each other, or it has several
            recordings.
    """
    check = _CHECKS.get(name)
    if check is not None:
        check(data)


def states_length(name: str, data: bytes) -> bool:
    """Return whether the file itself declares its duration, so that FFmpeg's value is reliable."""
    if name == "MP3":
        begin = _end_of_tags(data)
        return any(mark in data[begin : begin + _MARK_BYTES] for mark in _LENGTH_MARKS)
    return name == "FLAC"


def _end_of_tags(data: bytes) -> int:
    """Return the length in bytes of the ID3 tags at the beginning of a file."""
    end = 0
    while data.startswith(b"ID3", end) and len(data) >= end + 10:
        size = 0
        for byte in data[end + 6 : end + 10]:
            size = size << 7 | byte & 0x7F
        end += size + (20 if data[end + 5] & 0x10 else 10)
    return end


def _check_wav(data: bytes) -> None:
    at, has_samples = 12, False
    while at + 8 <= len(data):
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if kind == b"RIFF" and has_samples:  # FFmpeg would read only the first file
            raise IncompleteError(_SEVERAL)
        if kind == b"data" and not has_samples:
            if not 0 < size < _UNKNOWN:
                return
            _check_end(at + 8 + size, data)
            has_samples = True
        odd = size % 2 if data[at + 8 + size : at + 12 + size] != b"RIFF" else 0
        at += 8 + size + odd
    if not has_samples:
        raise IncompleteError("its header must be followed by samples, got the end of the file")


def _check_ogg(data: bytes) -> None:
    at, is_first, is_last = 0, True, False
    while at < len(data):
        if not data.startswith(b"OggS", at):
            raise IncompleteError(f"an Ogg page must begin at byte {at}, but other data is there")
        sizes = at + _OGG_HEADER_BYTES
        _check_end(sizes, data)
        payload = sizes + data[sizes - 1]
        _check_end(payload, data)
        if data[at + 5] & _OGG_IS_FIRST and not is_first:  # FFmpeg may stop decoding at this page
            raise IncompleteError(_SEVERAL)
        is_first = bool(data[at + 5] & _OGG_IS_FIRST)
        is_last = bool(data[at + 5] & _OGG_IS_LAST)
        at = payload + sum(data[sizes:payload])
        _check_end(at, data)
    if not is_last:
        raise IncompleteError("the file must end with its last Ogg page, but it ends before")


def _check_frames(data: bytes) -> None:
    """Check the chain of MP3 or AAC frames of a file.

    A file truncated between two frames cannot be distinguished from a complete one, unless it
    declares its length.
    """
    at = _end_of_tags(data)
    while (size := _frame_bytes(data[at : at + 7])) > 0:
        at += size
        _check_end(at, data)


def _frame_bytes(header: bytes) -> int:
    """Return the bytes of an MP3 or AAC frame; 0 if it is not a frame, or does not declare its
    size.
    """
    if len(header) < 7:  # the file ends here, or a frame was cut off
        return 7 if header.startswith(b"\xff") else 0
    if header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return 0
    if _LAYERS[header[1] >> 1 & 3] == "AAC":
        return (header[3] & 3) << 11 | header[4] << 3 | header[5] >> 5
    if _LAYERS[header[1] >> 1 & 3] != "MP3":
        return 0
    version, rate_index = header[1] >> 3 & 3, header[2] >> 2 & 3
    kbits = (_MP3_KBITS if version == 3 else _MP3_KBITS_2)[header[2] >> 4]
    if not kbits or rate_index == 3 or not _MP3_DIVISORS[version]:
        return 0
    rate = _MP3_RATES[rate_index] // _MP3_DIVISORS[version]
    return (144 if version == 3 else 72) * 1000 * kbits // rate + (header[2] >> 1 & 1)


def _check_mp4(data: bytes) -> None:
    at = 0
    while at < len(data):
        _check_end(at + 8, data)
        size, header = int.from_bytes(data[at : at + 4], "big"), 8
        if size == 1:
            size, header = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        if size == 0:  # 0 means: to the end of the file
            return
        if at and data[at + 4 : at + 8] == b"ftyp":  # FFmpeg would read only the first file
            raise IncompleteError(_SEVERAL)
        if size < header:
            raise IncompleteError(
                f"the box at byte {at} must have at least {header} bytes, got {size}"
            )
        at += size
    _check_end(at, data)


def _check_webm(data: bytes) -> None:
    """Check the chain of elements of the segment of a WebM file.

    Clusters of a live recording do not declare their size, so their elements are checked instead.
    """
    at = 0
    while at < len(data):
        id_bytes = _width(data, at)
        begin = at + id_bytes + _width(data, at + id_bytes)
        kind = int.from_bytes(data[at : at + id_bytes], "big")
        if at and kind == _EBML:
            raise IncompleteError(_SEVERAL)
        size_bytes = data[at + id_bytes : begin]
        # Removes the marker bit of the length.
        size = int.from_bytes(size_bytes, "big") - (1 << 7 * len(size_bytes))
        if size == (1 << 7 * len(size_bytes)) - 1:  # all bits set: the size is unknown
            if kind not in (_SEGMENT, _CLUSTER):
                raise IncompleteError(f"the element at byte {at} must have a size, got none")
            size = 0
        _check_end(begin + size, data)
        at = begin if kind == _SEGMENT else begin + size


def _check_avi(data: bytes) -> None:
    """Check that the file has one recording; further parts of a long one are named AVIX."""
    at = 0
    while data.startswith(b"RIFF", at):
        if at and data.startswith(b"AVI ", at + 8):  # FFmpeg would read only the first file
            raise IncompleteError(_SEVERAL)
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2


def _check_gif(data: bytes) -> None:
    """Check that the file has one recording. FFmpeg refuses damaged blocks."""
    at = 13 + _gif_color_bytes(data, 10)
    while at < len(data) and data[at] in (_GIF_EXTENSION, _GIF_IMAGE):
        at += 2 if data[at] == _GIF_EXTENSION else 11 + _gif_color_bytes(data, at + 9)
        while at < len(data) and data[at]:  # the length of a part of the content
            at += 1 + data[at]
        at += 1
    if data.startswith(b"\x3bGIF8", at):  # the end of a file; FFmpeg reads only the first one
        raise IncompleteError(_SEVERAL)


def _gif_color_bytes(data: bytes, at: int) -> int:
    """Return the bytes of a table of colors, of which a byte of flags tells the size."""
    flags = data[at] if at < len(data) else 0
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _width(data: bytes, at: int) -> int:
    """Return the bytes of a variable-size integer: 1 plus the number of its leading zeros.

    Raises:
        IncompleteError: it is truncated, or there is none.
    """
    _check_end(at + 1, data)
    width = 9 - data[at].bit_length()
    if width > 8:
        raise IncompleteError(f"an element must begin at byte {at}, but other data is there")
    _check_end(at + width, data)
    return width


def _check_end(end: int, data: bytes) -> None:
    if end > len(data):
        raise IncompleteError(f"it must have at least {end} bytes, got {len(data)}")


_CHECKS: dict[str, Callable[[bytes], None]] = {
    "WAV": _check_wav,
    "OGG": _check_ogg,
    "MP3": _check_frames,
    "AAC": _check_frames,
    "MP4": _check_mp4,
    "WebM": _check_webm,
    "AVI": _check_avi,
    "GIF": _check_gif,
}
"""Formats whose structure shows where they end. FFmpeg refuses the others when they are cut off, or
their samples are counted."""
