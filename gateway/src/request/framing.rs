//! Where a body ends, judged by the bytes of the head: over HTTP/1.1 framing is text, and servers repair it.

use memchr::memchr;

use crate::error::InvokeError;

/// Refuses every head whose body two readers could delimit in two ways. Stricter than HTTP/1.1 demands:
/// who sends such a thing is broken, or smuggles.
pub(super) fn check(raw: &[u8]) -> Result<(), InvokeError> {
    const LENGTHS: InvokeError = InvokeError::BadRequest("Content-Length must be there once, in digits only");
    const CODINGS: InvokeError =
        InvokeError::BadRequest("Transfer-Encoding must be there once, as `chunked`");
    let (mut length, mut chunked) = (false, false);
    let mut rest = raw;
    let mut first = true;
    while !rest.is_empty() {
        let (line, after) = rest.split_at(memchr(b'\n', rest).map_or(rest.len(), |end| end + 1));
        rest = after;
        let Some(line) = line.strip_suffix(b"\r\n") else {
            return Err(InvokeError::BadRequest(
                "a line of the head does not end with CR LF",
            ));
        };
        if std::mem::take(&mut first) {
            continue;
        }
        // The server's parser took care that there is a colon, and no blank before it.
        let Some(colon) = memchr(b':', line) else {
            continue;
        };
        let (name, value) = line.split_at(colon);
        let value = value.get(1..).unwrap_or_default().trim_ascii();
        if name.eq_ignore_ascii_case(b"content-length") {
            let digits = (1..=19).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
            if std::mem::replace(&mut length, true) || !digits {
                return Err(LENGTHS);
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding")
            && (std::mem::replace(&mut chunked, true) || !value.eq_ignore_ascii_case(b"chunked"))
        {
            return Err(CODINGS);
        }
    }
    if length && chunked {
        return Err(InvokeError::BadRequest(
            "Content-Length and Transfer-Encoding exclude each other",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_has_one_end_only() {
        let framing = |lines: &[u8]| {
            let mut raw = b"POST / HTTP/1.1\r\nHost: x\r\n".to_vec();
            raw.extend_from_slice(lines);
            raw.extend_from_slice(b"\r\n");
            check(&raw)
        };
        for fine in [
            &b""[..],
            b"Content-Length: 5\r\n",
            b"transfer-encoding:CHUNKED\r\n",
            b"content-length:\t0 \r\n",
        ] {
            assert_eq!(framing(fine), Ok(()), "{fine:?}");
        }
        for bad in [
            &b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"[..],
            b"Content-Length: 5\r\nContent-Length: 5\r\n",
            b"Content-Length: 5\r\ncontent-length: 6\r\n",
            b"Content-Length: +5\r\n",
            b"Content-Length: 5, 5\r\n",
            b"Content-Length: 0x5\r\n",
            b"Content-Length:\r\n",
            b"Content-Length: 99999999999999999999\r\n",
            b"Transfer-Encoding: identity\r\n",
            b"Transfer-Encoding: gzip, chunked\r\n",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            b"X: y\nContent-Length: 5\r\n",
        ] {
            assert!(matches!(framing(bad), Err(InvokeError::BadRequest(_))), "{bad:?}");
        }
    }
}
