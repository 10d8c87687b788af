//! W3C Trace Context: which trace a request belongs to, and what the next process is told of it.
//!
//! Pure. What cannot be read is no error: such a request belongs to no trace yet.

use http::{HeaderMap, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};
use tonic::metadata::MetadataMap;

/// `00-`, 32 digits, `-`, 16 digits, `-`, 2 digits.
const LENGTH: usize = 55;
/// The flags that are known: sampled, and that the trace id is random.
const FLAGS: u8 = 0b11;

/// The trace context of one request, on its way through this process. `tracestate` is never changed.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    parent: Option<HeaderValue>,
    state: Option<HeaderValue>,
    /// The span of this process that `parent` names.
    own: Option<SpanContext>,
}

// === impl Trace ===

impl Trace {
    /// As it came: `traceparent` and `tracestate`. Nothing is read yet.
    #[must_use]
    pub fn received(parent: Option<HeaderValue>, state: Option<HeaderValue>) -> Self {
        Self {
            parent,
            state,
            own: None,
        }
    }

    /// As it came with a call by gRPC.
    #[must_use]
    pub fn of(metadata: &MetadataMap) -> Self {
        let headers: &HeaderMap = metadata.as_ref();
        let get = |name| headers.get(name).cloned();
        Self::received(get("traceparent"), get("tracestate"))
    }

    /// What the next process gets as `traceparent`.
    #[must_use]
    pub fn traceparent(&self) -> Option<&HeaderValue> {
        self.parent.as_ref()
    }

    /// What the next process gets as `tracestate`.
    #[must_use]
    pub fn tracestate(&self) -> Option<&HeaderValue> {
        self.state.as_ref()
    }

    /// Both as texts, for a process that takes no headers; empty where there is none. What is longer than a function
    /// need take is left out.
    #[must_use]
    pub fn texts(&self) -> (&str, &str) {
        (text(self.parent.as_ref(), 128), text(self.state.as_ref(), 512))
    }

    /// The span that a new one would be a child of.
    pub(crate) fn span(&self) -> Option<SpanContext> {
        if let Some(own) = &self.own {
            return Some(own.clone());
        }
        let parent = parse(self.parent.as_ref()?.as_bytes())?;
        let state = self.state.as_ref().and_then(|state| state.to_str().ok());
        Some(SpanContext::new(
            parent.trace_id(),
            parent.span_id(),
            parent.trace_flags(),
            true,
            // One that cannot be read is passed on all the same; only the collector does not get it.
            state.and_then(|state| state.parse().ok()).unwrap_or_default(),
        ))
    }

    /// From here on the request belongs to this span.
    pub(crate) fn enter(&mut self, span: SpanContext) {
        if self.span().is_none() {
            // A state that belongs to no trace is nobody's.
            self.state = None;
        }
        self.parent = header(&span);
        self.own = Some(span);
    }
}

/// Reads a `traceparent` of this version or a later one.
fn parse(text: &[u8]) -> Option<SpanContext> {
    let (known, more) = text.split_at_checked(LENGTH)?;
    if [known[2], known[35], known[52]] != [b'-'; 3] {
        return None;
    }
    let version = hex(&known[..2])?;
    // A later version may say more, behind one more dash.
    if version == 0xff || (version == 0 && !more.is_empty()) || more.first().is_some_and(|next| *next != b'-')
    {
        return None;
    }
    let trace = TraceId::from_bytes(hex(&known[3..35])?.to_be_bytes());
    let span = SpanId::from_bytes(u64::try_from(hex(&known[36..52])?).ok()?.to_be_bytes());
    let flags = TraceFlags::new(u8::try_from(hex(&known[53..])?).ok()? & FLAGS);
    let context = SpanContext::new(trace, span, flags, true, TraceState::NONE);
    context.is_valid().then_some(context)
}

/// Lower case only, as the format has it.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |sum: u128, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(sum << 4 | u128::from(value))
    })
}

fn text(value: Option<&HeaderValue>, most: usize) -> &str {
    value
        .and_then(|value| value.to_str().ok())
        .filter(|text| text.len() <= most)
        .unwrap_or_default()
}

fn header(span: &SpanContext) -> Option<HeaderValue> {
    let flags = span.trace_flags().to_u8();
    HeaderValue::try_from(format!("00-{}-{}-{flags:02x}", span.trace_id(), span.span_id())).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn received(parent: &str, state: Option<&'static str>) -> Trace {
        let parent = HeaderValue::from_str(parent).ok();
        Trace::received(parent, state.map(HeaderValue::from_static))
    }

    #[test]
    fn a_parent_is_read_as_it_is_written() {
        let span = received(GOOD, Some("a=1,b=2")).span().unwrap();
        assert_eq!(header(&span).unwrap(), GOOD);
        assert!(span.is_remote() && span.is_sampled());
        assert_eq!(span.trace_state().header(), "a=1,b=2");
        let not = parse(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00").unwrap();
        assert!(!not.is_sampled());
        let odd = received(GOOD, Some("no state at all ===")).span().unwrap();
        assert_eq!(odd.trace_state().header(), "");
    }

    #[test]
    fn a_later_version_may_say_more() {
        for (text, valid) in [
            (format!("01-{}", &GOOD[3..]), true),
            (format!("cc-{}-what-else", &GOOD[3..]), true),
            (format!("cc-{}.what", &GOOD[3..]), false),
            (format!("{GOOD}-more"), false),
            (format!("ff-{}", &GOOD[3..]), false),
        ] {
            assert_eq!(parse(text.as_bytes()).is_some(), valid, "{text}");
        }
        // Flags that are not known here are not passed on.
        let span = parse(format!("{}ff", &GOOD[..53]).as_bytes()).unwrap();
        assert_eq!(
            header(&span).unwrap().to_str().unwrap(),
            format!("{}03", &GOOD[..53])
        );
    }

    #[test]
    fn what_is_malformed_belongs_to_no_trace() {
        for text in [
            "",
            "00",
            "00-ab-cd-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0g",
            "00_0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1",
        ] {
            assert!(received(text, None).span().is_none(), "{text}");
        }
    }

    #[test]
    fn a_state_goes_with_its_parent_only() {
        let span = || parse(GOOD.as_bytes()).unwrap();
        let mut whole = received(GOOD, Some("a=1"));
        whole.enter(span());
        assert_eq!(whole.tracestate().unwrap(), "a=1");
        let mut torn = received("nonsense", Some("a=1"));
        torn.enter(span());
        assert_eq!(
            (torn.tracestate(), torn.traceparent().unwrap().to_str().unwrap()),
            (None, GOOD)
        );
    }

    proptest! {
        #[test]
        fn no_bytes_can_break_it(text in proptest::collection::vec(any::<u8>(), 0..70)) {
            let _ = parse(&text);
        }

        #[test]
        fn every_span_is_read_back(trace in 1..u128::MAX, span in 1..u64::MAX, sampled in any::<bool>()) {
            let flags = TraceFlags::default().with_sampled(sampled);
            let context = SpanContext::new(trace.into(), span.into(), flags, true, TraceState::NONE);
            prop_assert_eq!(parse(header(&context).unwrap().as_bytes()), Some(context));
        }
    }
}
