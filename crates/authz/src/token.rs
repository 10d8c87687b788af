//! The caller's bearer token: read once, never printed.

use std::fmt;

use http::{HeaderValue, header::HeaderMap};
use ring::{
    hmac,
    rand::{SecureRandom, SystemRandom},
};
use serde::Deserialize;
use thiserror::Error;

use crate::ttl::TokenKind;

/// Tokens of real clusters have one to two thousand bytes, with many groups a few more.
pub const MAX_TOKEN_BYTES: usize = 16 * 1024;

/// A bearer token. Neither Debug nor any error shows a part of it.
#[derive(Clone)]
pub struct Bearer {
    /// `Bearer <token>`, marked sensitive: HTTP/2 does not index it and Debug does not print it.
    header: HeaderValue,
}

/// Why there is no token; each is a 401 (C-3.5). The texts are for callers and quote nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TokenError {
    /// No such header.
    #[error("the Authorization header is absent; send `Authorization: Bearer <token>`")]
    Absent,
    /// Two headers: which one counts would be a guess.
    #[error("there is more than one Authorization header; send exactly one")]
    Twice,
    /// Another scheme.
    #[error("the Authorization scheme is not Bearer; send `Authorization: Bearer <token>`")]
    NotBearer,
    /// Only the scheme.
    #[error("the bearer token is empty")]
    Empty,
    /// Blanks, commas, control or non-ASCII characters.
    #[error("the bearer token contains a character that tokens do not have")]
    Malformed,
    /// More than [`MAX_TOKEN_BYTES`].
    #[error("the bearer token is longer than {MAX_TOKEN_BYTES} bytes")]
    TooLong,
}

/// The random key under which this process digests tokens. It never leaves the process.
pub struct HmacKey(hmac::Key);

/// A keyed digest. It stands for its input and reveals nothing of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

const SCHEME: &[u8] = b"bearer";

// === impl Bearer ===

impl Bearer {
    /// Reads the token from all values of the `Authorization` header, or of the `authorization`
    /// metadata of the hop.
    ///
    /// # Errors
    /// For anything but exactly one well-formed bearer token. The scheme is read without case.
    pub fn parse<I>(values: I) -> Result<Self, TokenError>
    where
        I: IntoIterator<Item: AsRef<[u8]>>,
    {
        let mut values = values.into_iter();
        let value = values.next().ok_or(TokenError::Absent)?;
        if values.next().is_some() {
            return Err(TokenError::Twice);
        }
        Self::parse_one(value.as_ref())
    }

    /// [`Bearer::parse`] of a request's headers.
    ///
    /// # Errors
    /// As there.
    pub fn from_headers(headers: &HeaderMap) -> Result<Self, TokenError> {
        let values = headers.get_all(http::header::AUTHORIZATION);
        let mut each = values.iter();
        // As nearly every client writes it, and as it is forwarded: no copy is needed.
        if let (Some(value), None) = (each.next(), each.next())
            && value.as_bytes().starts_with(b"Bearer ")
        {
            token_of(value.as_bytes())?;
            let mut header = value.clone();
            header.set_sensitive(true);
            return Ok(Self { header });
        }
        Self::parse(values)
    }

    fn parse_one(value: &[u8]) -> Result<Self, TokenError> {
        let token = token_of(value)?;
        // The scheme is written anew, so that what is forwarded has one form.
        let mut header =
            HeaderValue::from_bytes(&[b"Bearer ", token].concat()).map_err(|_| TokenError::Malformed)?;
        header.set_sensitive(true);
        Ok(Self { header })
    }

    /// `Bearer <token>`, marked sensitive: to review it, and to forward it to the owner.
    #[must_use]
    pub fn header(&self) -> &HeaderValue {
        &self.header
    }

    /// Digest of the token together with `context`. Different lists of parts never share a digest.
    #[must_use]
    pub fn digest(&self, key: &HmacKey, context: &[&str]) -> Digest {
        let mut hmac = hmac::Context::with_key(&key.0);
        let parts = context.iter().map(|part| part.as_bytes());
        for part in std::iter::once(self.token()).chain(parts) {
            // A length before each part: `ab` + `c` is not `a` + `bc`.
            hmac.update(&(part.len() as u64).to_be_bytes());
            hmac.update(part);
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(hmac.sign().as_ref());
        Digest(digest)
    }

    /// What the token looks like. Nothing is verified: it may only shorten how long an answer is
    /// kept that the API server gave for this very token.
    #[must_use]
    pub fn kind(&self) -> TokenKind {
        #[derive(Deserialize)]
        struct Claims {
            // Some issuers write a fraction.
            exp: Option<serde_json::Number>,
        }
        match jsonwebtoken::dangerous::insecure_decode_claims::<Claims>(self.token()) {
            Ok(claims) => TokenKind::Jwt {
                expires: claims.exp.and_then(|exp| exp.as_f64()),
            },
            Err(_) => TokenKind::Opaque,
        }
    }

    fn token(&self) -> &[u8] {
        self.header.as_bytes().get(SCHEME.len() + 1..).unwrap_or_default()
    }
}

impl fmt::Debug for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bearer(…)")
    }
}

// === impl HmacKey ===

impl HmacKey {
    /// A new random key.
    ///
    /// # Errors
    /// When the operating system gives no random numbers.
    pub fn generate() -> Result<Self, ring::error::Unspecified> {
        let mut bytes = [0; 32];
        SystemRandom::new().fill(&mut bytes)?;
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, &bytes)))
    }
}

impl fmt::Debug for HmacKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HmacKey(…)")
    }
}

/// The token in the value of one `Authorization` header.
fn token_of(value: &[u8]) -> Result<&[u8], TokenError> {
    let (scheme, rest) = value
        .split_at_checked(SCHEME.len())
        .ok_or(TokenError::NotBearer)?;
    if !scheme.eq_ignore_ascii_case(SCHEME) {
        return Err(TokenError::NotBearer);
    }
    let token = match rest {
        [] | [b' '] => return Err(TokenError::Empty),
        [b' ', token @ ..] => token,
        [b'\t', ..] => return Err(TokenError::Malformed),
        _ => return Err(TokenError::NotBearer),
    };
    if token.len() > MAX_TOKEN_BYTES {
        return Err(TokenError::TooLong);
    }
    // Without a way out in between, so that many bytes are compared at once.
    let strange = |byte: &u8| !byte.is_ascii_graphic() | (*byte == b',');
    if token.iter().fold(false, |any, byte| any | strange(byte)) {
        return Err(TokenError::Malformed);
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    use proptest::prelude::*;

    use super::*;

    fn parse(value: &str) -> Result<Bearer, TokenError> {
        Bearer::parse([value])
    }

    fn jwt(claims: &str) -> Bearer {
        let part = |text: &str| URL_SAFE_NO_PAD.encode(text);
        let token = format!("{}.{}.c2ln", part(r#"{"alg":"RS256"}"#), part(claims));
        parse(&format!("Bearer {token}")).expect("well-formed")
    }

    proptest! {
        /// The form that is not copied is read like any other.
        #[test]
        fn headers_are_read_as_their_values(
            values in proptest::collection::vec("((B|b)earer )?[ -~\t\u{e9}]{0,12}", 0..3)
        ) {
            let mut headers = HeaderMap::new();
            for value in &values {
                let value = HeaderValue::from_bytes(value.as_bytes()).expect("a header");
                headers.append(http::header::AUTHORIZATION, value);
            }
            let forwarded = |read: Result<Bearer, TokenError>| read.map(|bearer| bearer.header);
            let read = forwarded(Bearer::from_headers(&headers));
            prop_assert_eq!(&read, &forwarded(Bearer::parse(&values)));
            prop_assert!(read.is_err() || read.is_ok_and(|header| header.is_sensitive()));
        }
    }

    /// Bug scenario 55.
    /// C-3.5
    #[test]
    fn exactly_one_bearer_token() {
        for good in ["Bearer abc", "bearer abc", "BEARER abc"] {
            let bearer = parse(good).expect(good);
            assert_eq!(bearer.header(), "Bearer abc", "one form is forwarded");
        }
        for (bad, error) in [
            ("", TokenError::NotBearer),
            ("Bearer", TokenError::Empty),
            ("Bearer ", TokenError::Empty),
            ("Bearer  abc", TokenError::Malformed),
            ("Bearer\tabc", TokenError::Malformed),
            ("Bearer a bc", TokenError::Malformed),
            ("Bearer a,b", TokenError::Malformed),
            ("Bearer abc, Bearer def", TokenError::Malformed),
            ("Bearer é", TokenError::Malformed),
            ("Bearer a\u{7f}", TokenError::Malformed),
            ("Bearerabc", TokenError::NotBearer),
            ("Basic abc", TokenError::NotBearer),
            (" Bearer abc", TokenError::NotBearer),
        ] {
            assert_eq!(parse(bad).expect_err(bad), error, "{bad:?}");
        }
        let none: [&str; 0] = [];
        assert_eq!(Bearer::parse(none).expect_err("none"), TokenError::Absent);
        assert_eq!(
            Bearer::parse(["Bearer a", "Bearer a"]).expect_err("two"),
            TokenError::Twice
        );
        let long = format!("Bearer {}", "a".repeat(MAX_TOKEN_BYTES + 1));
        assert_eq!(parse(&long).expect_err("long"), TokenError::TooLong);
        assert_eq!(
            Bearer::parse([b"Bearer \xff"]).expect_err("no text"),
            TokenError::Malformed
        );
    }

    #[test]
    fn the_digest_depends_on_every_part_and_on_the_key() {
        let key = HmacKey::generate().expect("random");
        let a = parse("Bearer aa").expect("a token");
        let b = parse("Bearer ab").expect("a token");
        let digest = |bearer: &Bearer, parts: &[&str]| bearer.digest(&key, parts);
        let base = digest(&a, &["get", "ns", "name", "uid"]);
        assert_eq!(base, digest(&a, &["get", "ns", "name", "uid"]));
        for other in [
            digest(&b, &["get", "ns", "name", "uid"]),
            digest(&a, &["update", "ns", "name", "uid"]),
            digest(&a, &["get", "n", "sname", "uid"]),
            digest(&a, &["get", "ns", "name", "uid2"]),
            digest(&a, &["get", "ns", "nameuid"]),
            a.digest(
                &HmacKey::generate().expect("random"),
                &["get", "ns", "name", "uid"],
            ),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn what_a_token_looks_like() {
        let expires = |claims: &str| jwt(claims).kind();
        let at = |seconds: f64| TokenKind::Jwt {
            expires: Some(seconds),
        };
        assert_eq!(expires(r#"{"exp":1800000000}"#), at(1.8e9));
        assert_eq!(expires(r#"{"exp":1800000000.5}"#), at(1_800_000_000.5));
        assert_eq!(
            expires(r#"{"sub":"x"}"#),
            TokenKind::Jwt { expires: None },
            "a legacy Secret's token"
        );
        assert_eq!(expires(r#"{"exp":"soon"}"#), TokenKind::Opaque);
        for opaque in ["Bearer abc", "Bearer id.secret", "Bearer a.b.c"] {
            let kind = parse(opaque).expect(opaque).kind();
            assert_eq!(kind, TokenKind::Opaque, "{opaque}");
        }
    }

    proptest! {
        /// Bug scenario 56: no part of a token can be printed.
        #[test]
        fn nothing_prints_a_token(token in "[A-Za-z0-9._~+/-]{12,200}") {
            let bearer = parse(&format!("Bearer {token}")).expect("well-formed");
            let text = format!("{bearer:?} {:?}", bearer.header());
            prop_assert!(!text.contains(&token[3..9]), "{}", text);
            let error = parse(&format!("Bearer {token},x")).expect_err("a comma");
            let text = format!("{error} {error:?}");
            prop_assert!(!text.contains(&token[3..9]), "{}", text);
        }

        #[test]
        fn no_header_is_a_panic(value in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(bearer) = Bearer::parse([value]) {
                let _ = bearer.kind();
            }
        }
    }
}
