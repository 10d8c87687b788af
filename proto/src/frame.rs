//! A call as gRPC sends it, without a copy of a large payload.

use prost::{
    bytes::{BufMut as _, Bytes, BytesMut},
    encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len},
};

/// Path of the call in HTTP/2.
pub const INVOKE_FUNCTION: &str = "/executor.v1.FunctionRuntime/InvokeFunction";

/// One message with gRPC's prefix, in two parts that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Framed {
    /// Prefix, fields, and a small payload.
    pub head: Bytes,
    /// A large payload as it was given; else empty.
    pub tail: Bytes,
}

/// Bytes of gRPC's prefix: a flag, and the length.
pub const PREFIX_BYTES: usize = 5;

/// Number of the field `input` of `InvokeFunctionRequest`.
const INPUT: u32 = 3;
/// A payload up to this many bytes is copied, which costs less than a frame of its own.
const COPIED_BYTES: usize = 8 * 1024;

/// A request without its payload, borrowed from wherever its texts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fields<'a> {
    /// `registration.run_uid`
    pub run_uid: &'a str,
    /// `registration.registration_id`
    pub registration_id: &'a str,
    /// `invocation_id`
    pub invocation_id: &'a str,
    /// `content_type`
    pub content_type: &'a str,
    /// `timeout_millis`
    pub timeout_millis: i64,
}

/// Frames a request whose payload is `input`, which goes last; the order of fields means nothing to the other side.
#[must_use]
pub fn invoke_request(fields: Fields<'_>, input: Bytes) -> Framed {
    let registration = text_len(1, fields.run_uid) + text_len(2, fields.registration_id);
    // A negative number has ten bytes.
    #[expect(clippy::cast_sign_loss, reason = "as Protocol Buffers write it")]
    let timeout = fields.timeout_millis as u64;
    let bytes = field_len(1, registration)
        + text_len(2, fields.invocation_id)
        + text_len(4, fields.content_type)
        + if timeout == 0 {
            0
        } else {
            key_len(5) + encoded_len_varint(timeout)
        };
    let payload = match input.len() {
        0 => 0,
        bytes => field_len(INPUT, bytes),
    };
    let copied = input.len() <= COPIED_BYTES;
    let room = PREFIX_BYTES + bytes + payload - if copied { 0 } else { input.len() };
    let mut head = BytesMut::with_capacity(room);
    head.put_u8(0);
    // Far below 4 GiB: payloads are bounded long before.
    head.put_u32(u32::try_from(bytes + payload).unwrap_or(u32::MAX));
    put_len(&mut head, 1, registration);
    put_text(&mut head, 1, fields.run_uid);
    put_text(&mut head, 2, fields.registration_id);
    put_text(&mut head, 2, fields.invocation_id);
    put_text(&mut head, 4, fields.content_type);
    if timeout != 0 {
        encode_key(5, WireType::Varint, &mut head);
        encode_varint(timeout, &mut head);
    }
    if !input.is_empty() {
        put_len(&mut head, INPUT, input.len());
    }
    let tail = if copied {
        head.extend_from_slice(&input);
        Bytes::new()
    } else {
        input
    };
    Framed {
        head: head.freeze(),
        tail,
    }
}

/// Bytes of a field with so many bytes in it.
fn field_len(number: u32, bytes: usize) -> usize {
    key_len(number) + encoded_len_varint(bytes as u64) + bytes
}

/// An empty text is left out.
fn text_len(number: u32, text: &str) -> usize {
    if text.is_empty() {
        0
    } else {
        field_len(number, text.len())
    }
}

fn put_len(out: &mut BytesMut, number: u32, bytes: usize) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes as u64, out);
}

fn put_text(out: &mut BytesMut, number: u32, text: &str) {
    if !text.is_empty() {
        put_len(out, number, text.len());
        out.put_slice(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::executor::{FunctionRegistration, InvokeFunctionRequest};

    proptest! {
        /// What is read is what was meant, with a payload of any size.
        #[test]
        fn a_framed_call_reads_as_it_was(
            texts in prop::array::uniform4("[a-zä]{0,40}"),
            timeout_millis in prop_oneof![any::<i64>(), 0..400_000_i64],
            size in prop_oneof![0..300_usize, COPIED_BYTES - 2..COPIED_BYTES + 3, Just(1 << 20)],
        ) {
            let input = Bytes::from(vec![b'x'; size]);
            let [run_uid, registration_id, invocation_id, content_type] = texts;
            let fields = Fields {
                run_uid: &run_uid,
                registration_id: &registration_id,
                invocation_id: &invocation_id,
                content_type: &content_type,
                timeout_millis,
            };
            let framed = invoke_request(fields, input.clone());
            prop_assert_eq!(framed.tail.len(), if size > COPIED_BYTES { size } else { 0 });
            let whole = [framed.head, framed.tail].concat();
            prop_assert_eq!(whole[0], 0);
            prop_assert_eq!(&whole[1..5], u32::try_from(whole.len() - 5).unwrap().to_be_bytes());
            let read = InvokeFunctionRequest::decode(&whole[5..]).unwrap();
            let registration = Some(FunctionRegistration {
                run_uid,
                registration_id,
            });
            prop_assert_eq!(read, InvokeFunctionRequest {
                registration,
                invocation_id,
                input,
                content_type,
                timeout_millis,
            });
        }
    }
}
