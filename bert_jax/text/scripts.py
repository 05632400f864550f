"""Characters of scripts without spaces between words, as parts of regular expressions."""

from unicodedata import category

# Chinese characters, and marks of Chinese and Japanese.
CHINESE = r"\u3001-\u303f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff60\U00020000-\U0003ffff"
CHINESE_AND_KANA = rf"{CHINESE}\u3040-\u30ff"
# With Thai, Lao, Tibetan, Burmese and Khmer.
SPACELESS = rf"[{CHINESE_AND_KANA}\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff]"
MARKS = f"[{''.join(c for c in map(chr, range(0xE00, 0x1800)) if category(c).startswith('M'))}]"
