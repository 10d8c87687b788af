//! A call as gRPC sends it, without a copy of a large payload.

use prost::{
    Message as _,
    bytes::{BufMut as _, Bytes, BytesMut},
    encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len},
};

use crate::executor::InvokeFunctionRequest;

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

/// Number of the field `input` of [`InvokeFunctionRequest`].
const INPUT: u32 = 3;
/// A payload up to this many bytes is copied, which costs less than a frame of its own.
const COPIED_BYTES: usize = 8 * 1024;

/// Frames a request whose payload is `input`, which goes last; the order of fields means nothing to the other side.
/// What `request` itself has as its input must be empty.
#[must_use]
pub fn invoke_request(request: &InvokeFunctionRequest, input: Bytes) -> Framed {
    debug_assert!(request.input.is_empty(), "one payload");
    let fields = request.encoded_len();
    let payload = match input.len() {
        0 => 0,
        bytes => key_len(INPUT) + encoded_len_varint(bytes as u64) + bytes,
    };
    let copied = input.len() <= COPIED_BYTES;
    let room = PREFIX_BYTES + fields + payload - if copied { 0 } else { input.len() };
    let mut head = BytesMut::with_capacity(room);
    head.put_u8(0);
    // Far below 4 GiB: payloads are bounded long before.
    head.put_u32(u32::try_from(fields + payload).unwrap_or(u32::MAX));
    request.encode_raw(&mut head);
    if !input.is_empty() {
        encode_key(INPUT, WireType::LengthDelimited, &mut head);
        encode_varint(input.len() as u64, &mut head);
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::executor::FunctionRegistration;

    fn request(id: &str, timeout_millis: i64) -> InvokeFunctionRequest {
        InvokeFunctionRequest {
            registration: Some(FunctionRegistration {
                run_uid: id.chars().rev().collect(),
                registration_id: String::new(),
            }),
            invocation_id: id.to_owned(),
            input: Bytes::new(),
            content_type: "application/json".to_owned(),
            timeout_millis,
        }
    }

    proptest! {
        /// What is read is what was meant, with a payload of any size.
        #[test]
        fn a_framed_call_reads_as_it_was(
            id in "[a-z0-9]{0,40}",
            timeout in any::<i64>(),
            size in prop_oneof![0..300_usize, COPIED_BYTES - 2..COPIED_BYTES + 3, Just(1 << 20)],
        ) {
            let input = Bytes::from(vec![b'x'; size]);
            let framed = invoke_request(&request(&id, timeout), input.clone());
            prop_assert_eq!(framed.tail.len(), if size > COPIED_BYTES { size } else { 0 });
            let whole = [framed.head, framed.tail].concat();
            prop_assert_eq!(whole[0], 0);
            prop_assert_eq!(&whole[1..5], u32::try_from(whole.len() - 5).unwrap().to_be_bytes());
            let read = InvokeFunctionRequest::decode(&whole[5..]).unwrap();
            prop_assert_eq!(read, InvokeFunctionRequest { input, ..request(&id, timeout) });
        }
    }
}
