//! Huffman coding of header strings, reading only (RFC 7541, section 5.2 and appendix B).
//!
//! The code is canonical: symbols in order of length and then of value have consecutive codes, so that the lengths alone
//! give all of it.

/// Bits of each symbol's code; the last is the end of a string, which is never written.
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28,
    28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7,
    7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21,
    23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24,
    21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
];

const SYMBOLS: usize = 257;
const END: u16 = 256;
const LONGEST: usize = 30;

/// Codes of one length.
#[derive(Clone, Copy)]
struct Row {
    bits: u32,
    /// First code, and the first that is longer, at the top of 32 bits.
    from: u32,
    to: u64,
    /// Where its symbols begin in [`ORDER`].
    at: usize,
}

/// Symbols by code.
const ORDER: [u16; SYMBOLS] = order();
/// Lengths that exist, shortest first: most characters are among the first four.
const ROWS: [Row; rows().1] = {
    let (all, count) = rows();
    let mut kept = [all[0]; rows().1];
    let mut i = 0;
    while i < count {
        kept[i] = all[i];
        i += 1;
    }
    kept
};

const fn order() -> [u16; SYMBOLS] {
    let mut order = [0; SYMBOLS];
    let mut at = 0;
    let mut length = 1;
    while length <= LONGEST {
        let mut symbol = 0;
        while symbol < SYMBOLS {
            if LENGTHS[symbol] as usize == length {
                #[expect(clippy::cast_possible_truncation, reason = "257 of them")]
                {
                    order[at] = symbol as u16;
                }
                at += 1;
            }
            symbol += 1;
        }
        length += 1;
    }
    order
}

const fn rows() -> ([Row; LONGEST], usize) {
    let none = Row {
        bits: 0,
        from: 0,
        to: 0,
        at: 0,
    };
    let mut rows = [none; LONGEST];
    let (mut count, mut at, mut code) = (0, 0, 0_u64);
    let mut length = 1;
    while length <= LONGEST {
        let mut here = 0;
        let mut symbol = 0;
        while symbol < SYMBOLS {
            here += (LENGTHS[symbol] as usize == length) as usize;
            symbol += 1;
        }
        if here > 0 {
            let shift = 32 - length;
            #[expect(clippy::cast_possible_truncation, reason = "codes have at most 30 bits")]
            {
                rows[count] = Row {
                    bits: length as u32,
                    from: (code << shift) as u32,
                    to: (code + here as u64) << shift,
                    at,
                };
            }
            count += 1;
            at += here;
            code += here as u64;
        }
        code <<= 1;
        length += 1;
    }
    (rows, count)
}

/// The text that `coded` stands for; nothing if it is no such code, or its padding is none.
pub(super) fn decode(coded: &[u8]) -> Option<Vec<u8>> {
    // The shortest code has five bits.
    let mut text = Vec::with_capacity(coded.len() * 8 / 5);
    let mut coming = coded.iter();
    // Bits that are not used yet, at the top.
    let (mut held, mut count) = (0_u64, 0_u32);
    loop {
        while count <= 56 {
            let Some(byte) = coming.next() else { break };
            held |= u64::from(*byte) << (56 - count);
            count += 8;
        }
        let top = u32::try_from(held >> 32).unwrap_or_default();
        if count < 8 && top.leading_ones() >= count {
            // The rest is the beginning of the end's code, less than a byte of it.
            return Some(text);
        }
        let row = ROWS.iter().find(|row| u64::from(top) < row.to)?;
        if row.bits > count {
            return None;
        }
        let symbol = ORDER.get(row.at + ((top - row.from) >> (32 - row.bits)) as usize)?;
        if *symbol == END {
            return None;
        }
        text.push(u8::try_from(*symbol).ok()?);
        held <<= row.bits;
        count -= row.bits;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7541, appendix C.4 and C.6.
    #[test]
    fn what_the_standard_writes_is_read() {
        let examples: [(&[u8], &str); 4] = [
            (
                &[
                    0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff,
                ],
                "www.example.com",
            ),
            (&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf], "no-cache"),
            (&[0x64, 0x02], "302"),
            (&[0xae, 0xc3, 0x77, 0x1a, 0x4b], "private"),
        ];
        for (coded, text) in examples {
            assert_eq!(decode(coded).as_deref(), Some(text.as_bytes()), "{text}");
        }
        assert_eq!(decode(&[]), Some(Vec::new()));
    }

    #[test]
    fn what_is_no_code_is_refused() {
        let bad: [(&str, &[u8]); 4] = [
            ("the end, written", &[0xff, 0xff, 0xff, 0xff]),
            ("a whole byte of padding", &[0x64, 0x02, 0xff]),
            ("padding with zeros", &[0x00]),
            ("a code that is cut", &[0xfe]),
        ];
        for (what, coded) in bad {
            assert_eq!(decode(coded), None, "{what}");
        }
    }
}
