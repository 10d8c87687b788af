//! What may come back from a Runtime Server (C-5.3): a custom server is not trusted to keep
//! the limits, and a message that breaks them must not reach a caller.

use std::collections::HashMap;

use kruntimes_proto::{
    executor::{InvokeFunctionRequest, InvokeFunctionResponse},
    failure::{Component, Failure, Reason},
    limits,
};

/// Checks a request of the hop before it takes the slot.
///
/// # Errors
/// [`Reason::InvalidPayload`], by runtimed.
pub fn check_request(request: &InvokeFunctionRequest) -> Result<(), Failure> {
    let invalid = |detail: String| Err(Failure::new(Reason::InvalidPayload, detail).by(Component::Runtimed));
    if request.input.len() > limits::INPUT_BYTES {
        return invalid(format!(
            "the input has {} bytes; at most {} are accepted",
            request.input.len(),
            limits::INPUT_BYTES
        ));
    }
    if request.timeout_millis < 0 {
        return invalid("timeout_millis is below zero; zero means the default".to_owned());
    }
    if let Err(detail) = content_type(&request.content_type) {
        return invalid(format!("content type of the input: {detail}"));
    }
    if limits::nests_deeper(&request.input, limits::JSON_DEPTH) {
        return invalid(format!(
            "the input nests deeper than {} levels",
            limits::JSON_DEPTH
        ));
    }
    Ok(())
}

/// Checks an answer of the Runtime Server.
///
/// # Errors
/// [`Reason::InvalidOutput`] when the function's output breaks a limit,
/// [`Reason::RuntimeServerError`] when the server broke its protocol.
pub fn check_response(response: &InvokeFunctionResponse, registration_id: &str) -> Result<(), Failure> {
    let answered = response
        .registration
        .as_ref()
        .map_or("", |it| it.registration_id.as_str());
    if !answered.is_empty() && answered != registration_id {
        return Err(Failure::new(
            Reason::RuntimeServerError,
            "the answer is of another registration",
        ));
    }
    if response.output.len() > limits::OUTPUT_BYTES {
        return Err(Failure::new(
            Reason::InvalidOutput,
            format!(
                "the output has {} bytes; at most {} are passed on",
                response.output.len(),
                limits::OUTPUT_BYTES
            ),
        ));
    }
    if let Err(detail) = content_type(&response.content_type) {
        return Err(Failure::new(
            Reason::InvalidOutput,
            format!("content type of the output: {detail}"),
        ));
    }
    outputs(&response.outputs).map_err(|detail| Failure::new(Reason::InvalidOutput, detail))
}

/// Printable ASCII, as it becomes an HTTP header.
fn content_type(text: &str) -> Result<(), &'static str> {
    if text.len() > limits::CONTENT_TYPE_BYTES {
        return Err("longer than 256 bytes");
    }
    if !text.bytes().all(|byte| (0x20..=0x7e).contains(&byte)) {
        return Err("holds a byte that is no printable ASCII");
    }
    Ok(())
}

/// Never quotes a value (C-5.4).
fn outputs(outputs: &HashMap<String, String>) -> Result<(), String> {
    if outputs.len() > limits::OUTPUTS_KEYS {
        return Err(format!(
            "outputs has {} keys; at most {} are accepted",
            outputs.len(),
            limits::OUTPUTS_KEYS
        ));
    }
    let mut total = 0;
    for (key, value) in outputs {
        if key.is_empty() || key.len() > limits::OUTPUTS_KEY_BYTES {
            return Err(format!(
                "a key of outputs has {} bytes; 1 to {} are accepted",
                key.len(),
                limits::OUTPUTS_KEY_BYTES
            ));
        }
        if value.len() > limits::OUTPUTS_VALUE_BYTES {
            return Err(format!(
                "a value of outputs has {} bytes; at most {} are accepted",
                value.len(),
                limits::OUTPUTS_VALUE_BYTES
            ));
        }
        total += key.len() + value.len();
    }
    if total > limits::OUTPUTS_TOTAL_BYTES {
        return Err(format!(
            "outputs has {total} bytes together; at most {} are accepted",
            limits::OUTPUTS_TOTAL_BYTES
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(change: impl FnOnce(&mut InvokeFunctionResponse)) -> Result<(), Reason> {
        let mut response = InvokeFunctionResponse {
            content_type: "application/json".to_owned(),
            ..InvokeFunctionResponse::default()
        };
        change(&mut response);
        check_response(&response, "reg_1").map_err(|failure| failure.reason)
    }

    /// C-5.3: the output has at most a mebibyte.
    #[test]
    fn the_output_has_at_most_a_mebibyte() {
        let sized = |size: usize| response(|it| it.output = vec![b'x'; size].into());
        assert_eq!(sized(limits::OUTPUT_BYTES), Ok(()));
        assert_eq!(sized(limits::OUTPUT_BYTES + 1), Err(Reason::InvalidOutput));
    }

    /// C-5.3: outputs have four limits.
    #[test]
    fn outputs_have_four_limits() {
        let with = |pairs: Vec<(String, String)>| response(|it| it.outputs = pairs.into_iter().collect());
        let many = |count: usize, size: usize| {
            with(
                (0..count)
                    .map(|it| (format!("{it:03}"), "v".repeat(size)))
                    .collect(),
            )
        };
        assert_eq!(many(64, 1), Ok(()));
        assert_eq!(many(65, 1), Err(Reason::InvalidOutput));
        assert_eq!(many(7, 8192), Ok(()));
        assert_eq!(many(1, 8193), Err(Reason::InvalidOutput));
        assert_eq!(
            many(8, 8192),
            Err(Reason::InvalidOutput),
            "together with the keys"
        );
        assert_eq!(with(vec![("k".repeat(128), String::new())]), Ok(()));
        for key in [String::new(), "k".repeat(129)] {
            assert_eq!(with(vec![(key, String::new())]), Err(Reason::InvalidOutput));
        }
    }

    #[test]
    fn a_content_type_cannot_smuggle_a_header() {
        for bad in ["text/plain\r\nx: y".to_owned(), "é".to_owned(), "a".repeat(257)] {
            assert_eq!(response(|it| it.content_type = bad), Err(Reason::InvalidOutput));
        }
        assert_eq!(
            response(|it| it.content_type.clear()),
            Ok(()),
            "the gateway has a default"
        );
    }

    #[test]
    fn an_answer_of_another_registration_is_the_servers_fault() {
        let other = |id: &str| {
            response(|it| {
                it.registration = Some(kruntimes_proto::executor::FunctionRegistration {
                    run_uid: String::new(),
                    registration_id: id.to_owned(),
                });
            })
        };
        assert_eq!(other("reg_2"), Err(Reason::RuntimeServerError));
        assert_eq!(other("reg_1"), Ok(()));
    }

    #[test]
    fn a_value_is_never_quoted() {
        let outputs = HashMap::from([("k".to_owned(), format!("secret{}", "v".repeat(9000)))]);
        let response = InvokeFunctionResponse {
            outputs,
            ..Default::default()
        };
        let failure = check_response(&response, "reg_1").unwrap_err();
        assert!(!failure.detail.contains("secret"), "{}", failure.detail);
    }
}
