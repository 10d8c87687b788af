//! What OpenTelemetry's names in the environment say. Without an endpoint: nothing at all.

use std::{fs, io, time::Duration};

use http::Uri;
use opentelemetry::KeyValue;
use opentelemetry_sdk::{Resource, trace::Sampler};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";
const TRACES_PROTOCOL: &str = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL";
const CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_CERTIFICATE";
const TRACES_CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE";
const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";
const RESOURCE_ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";

/// How long a connection to the collector may take to be made.
const CONNECT: Duration = Duration::from_secs(5);

/// Where spans go, which ones, and in whose name.
#[derive(Debug, Clone)]
pub struct Settings {
    pub(crate) endpoint: Endpoint,
    pub(crate) sampler: Sampler,
    pub(crate) resource: Resource,
}

/// Why no spans can be sent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A name has a value that makes no sense. The value is not told: an address may hold a password.
    #[error("{name} {remedy}")]
    Value {
        /// The name.
        name: &'static str,
        /// What is wrong, and what to write.
        remedy: String,
    },
    /// The system has no room for the thread that sends.
    #[error("the thread that sends spans cannot be started: {0}")]
    Thread(#[from] io::Error),
    /// The exporter does not like what it reads from the environment by itself.
    #[error("spans cannot be sent with these OTEL_EXPORTER_OTLP_ settings: {0}")]
    Exporter(String),
}

// === impl Settings ===

impl Settings {
    /// Reads the names by `get`; nothing when no endpoint is named. An empty value counts as none.
    ///
    /// # Errors
    /// Names the name and the remedy.
    pub fn read(service: &'static str, get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, Error> {
        let get = |name: &'static str| {
            let value = get(name)?.trim().to_owned();
            (!value.is_empty()).then_some((name, value))
        };
        let either = |one, other| get(one).or_else(|| get(other));
        let Some((name, url)) = either(TRACES_ENDPOINT, ENDPOINT) else {
            return Ok(None);
        };
        if let Some((name, protocol)) = either(TRACES_PROTOCOL, PROTOCOL)
            && protocol != "grpc"
        {
            return Err(wrong(
                name,
                format!("is `{protocol}`, and only grpc is spoken here; leave it out"),
            ));
        }
        let mut attributes = vec![
            KeyValue::new("telemetry.sdk.name", "opentelemetry"),
            KeyValue::new("telemetry.sdk.language", "rust"),
            KeyValue::new("service.name", service),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        ];
        // In a Pod that is its name.
        if let Some((_, host)) = get("HOSTNAME") {
            attributes.push(KeyValue::new("service.instance.id", host));
        }
        // The later one wins.
        if let Some((name, text)) = get(RESOURCE_ATTRIBUTES) {
            attributes.extend(pairs(&text).ok_or_else(|| {
                wrong(
                    name,
                    "must be name=value pairs with commas between, special characters as %XX",
                )
            })?);
        }
        if let Some((_, own)) = get(SERVICE_NAME) {
            attributes.push(KeyValue::new("service.name", own));
        }
        Ok(Some(Self {
            endpoint: endpoint(name, &url, either(TRACES_CERTIFICATE, CERTIFICATE))?,
            sampler: sampler(get(SAMPLER), get(SAMPLER_ARG))?,
            resource: Resource::builder_empty().with_attributes(attributes).build(),
        }))
    }
}

fn wrong(name: &'static str, remedy: impl Into<String>) -> Error {
    Error::Value {
        name,
        remedy: remedy.into(),
    }
}

fn endpoint(
    name: &'static str,
    url: &str,
    certificate: Option<(&'static str, String)>,
) -> Result<Endpoint, Error> {
    let form = || {
        wrong(
            name,
            "must be http://HOST:PORT or https://HOST:PORT, of a collector's port for gRPC (4317 as a rule), without a path",
        )
    };
    let uri: Uri = url.parse().map_err(|_| form())?;
    let bare = uri.path() == "/"
        && uri.query().is_none()
        && uri
            .authority()
            .is_some_and(|authority| !authority.as_str().contains('@'));
    let tls = match uri.scheme_str() {
        Some("http") if bare => false,
        Some("https") if bare => true,
        _ => return Err(form()),
    };
    let endpoint = Endpoint::from(uri).connect_timeout(CONNECT);
    if !tls {
        return Ok(endpoint);
    }
    let (name, config) = match certificate {
        Some((name, path)) => {
            let pem = fs::read(&path)
                .map_err(|error| wrong(name, format!("names a file that cannot be read, {path}: {error}")))?;
            (
                name,
                ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
            )
        }
        None => (name, ClientTlsConfig::new().with_native_roots()),
    };
    endpoint.tls_config(config).map_err(|error| {
        let remedy = format!("needs certificates to trust: {error}; name a PEM file with {CERTIFICATE}");
        wrong(name, remedy)
    })
}

/// All of them follow the caller: what it does not sample is sampled nowhere.
fn sampler(
    name: Option<(&'static str, String)>,
    arg: Option<(&'static str, String)>,
) -> Result<Sampler, Error> {
    let root = match name.as_ref().map(|(_, sampler)| sampler.as_str()) {
        None | Some("parentbased_always_on") => Sampler::AlwaysOn,
        Some("parentbased_always_off") => Sampler::AlwaysOff,
        Some("parentbased_traceidratio") => Sampler::TraceIdRatioBased(ratio(arg)?),
        Some(_) => {
            let remedy = "must be parentbased_always_on, parentbased_always_off or parentbased_traceidratio";
            return Err(wrong(SAMPLER, remedy));
        }
    };
    Ok(Sampler::ParentBased(Box::new(root)))
}

fn ratio(arg: Option<(&'static str, String)>) -> Result<f64, Error> {
    let Some((name, text)) = arg else { return Ok(1.0) };
    text.parse()
        .ok()
        .filter(|ratio| (0.0..=1.0).contains(ratio))
        .ok_or_else(|| {
            wrong(
                name,
                "must be a number from 0 to 1, such as 0.1 for a tenth of all traces",
            )
        })
}

fn pairs(text: &str) -> Option<Vec<KeyValue>> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=')?;
            let name = decode(name.trim()).filter(|name| !name.is_empty())?;
            Some(KeyValue::new(name, decode(value.trim())?))
        })
        .collect()
}

/// `%XX` is a byte of UTF-8.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(letter) = rest.next() {
        if letter == '%' {
            let digit = |letter: Option<char>| letter?.to_digit(16);
            let value = digit(rest.next())? * 16 + digit(rest.next())?;
            bytes.push(u8::try_from(value).ok()?);
        } else {
            bytes.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(names: &[(&str, &str)]) -> Result<Option<Settings>, Error> {
        let find = |name: &str| names.iter().find(|(known, _)| *known == name);
        Settings::read("kruntimes-x", |name| {
            find(name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn of(settings: &Settings, key: &'static str) -> Option<String> {
        settings.resource.get(&key.into()).map(|value| value.to_string())
    }

    #[test]
    fn without_an_endpoint_nothing_is_sent_and_nothing_is_wrong() {
        assert!(read(&[]).unwrap().is_none());
        assert!(read(&[(ENDPOINT, " "), (SAMPLER, "nonsense")]).unwrap().is_none());
    }

    #[test]
    fn the_endpoint_of_traces_wins() {
        let names = [
            (ENDPOINT, "http://general:4317"),
            (TRACES_ENDPOINT, "http://traces:4317/"),
        ];
        let settings = read(&names).unwrap().unwrap();
        assert_eq!(settings.endpoint.uri().host(), Some("traces"));
        assert!(matches!(&settings.sampler, Sampler::ParentBased(_)));
        assert!(format!("{:?}", settings.sampler).contains("AlwaysOn"));
    }

    #[test]
    fn resource_and_sampler_are_the_operators() {
        let names = [
            (ENDPOINT, "http://c:4317"),
            (
                RESOURCE_ATTRIBUTES,
                "service.name=theirs, deployment.environment.name=t%C3%A9st%2C1 ,",
            ),
            (SAMPLER, "parentbased_traceidratio"),
            (SAMPLER_ARG, "0.25"),
            ("HOSTNAME", "pod-a"),
        ];
        let settings = read(&names).unwrap().unwrap();
        assert_eq!(of(&settings, "service.name").as_deref(), Some("theirs"));
        assert_eq!(of(&settings, "service.instance.id").as_deref(), Some("pod-a"));
        let environment = of(&settings, "deployment.environment.name");
        assert_eq!(environment.as_deref(), Some("tést,1"));
        assert!(format!("{:?}", settings.sampler).contains("TraceIdRatioBased(0.25)"));
        let named = [&names[..], &[(SERVICE_NAME, "mine")]].concat();
        assert_eq!(
            of(&read(&named).unwrap().unwrap(), "service.name").as_deref(),
            Some("mine")
        );
        let plain = read(&names[..1]).unwrap().unwrap();
        assert_eq!(of(&plain, "service.name").as_deref(), Some("kruntimes-x"));
    }

    #[test]
    fn nonsense_names_the_name_and_the_remedy_and_no_password() {
        let good = (ENDPOINT, "http://c:4317");
        for (names, name, remedy) in [
            (&[(ENDPOINT, "collector:4317")][..], ENDPOINT, "http://HOST:PORT"),
            (&[(ENDPOINT, "ftp://c:4317")], ENDPOINT, "http://HOST:PORT"),
            (
                &[(ENDPOINT, "http://c:4318/v1/traces")],
                ENDPOINT,
                "without a path",
            ),
            (
                &[(TRACES_ENDPOINT, "http://me:hunter2@c:4317")],
                TRACES_ENDPOINT,
                "HOST:PORT",
            ),
            (&[good, (PROTOCOL, "http/protobuf")], PROTOCOL, "only grpc"),
            (&[good, (SAMPLER, "always_on")], SAMPLER, "parentbased_always_on"),
            (
                &[good, (SAMPLER, "parentbased_traceidratio"), (SAMPLER_ARG, "10%")],
                SAMPLER_ARG,
                "0 to 1",
            ),
            (
                &[good, (SAMPLER, "parentbased_traceidratio"), (SAMPLER_ARG, "NaN")],
                SAMPLER_ARG,
                "0 to 1",
            ),
            (
                &[good, (RESOURCE_ATTRIBUTES, "lonely")],
                RESOURCE_ATTRIBUTES,
                "name=value",
            ),
            (
                &[good, (RESOURCE_ATTRIBUTES, "a=%zz")],
                RESOURCE_ATTRIBUTES,
                "%XX",
            ),
            (
                &[(ENDPOINT, "https://c:4317"), (CERTIFICATE, "/none/ca.pem")],
                CERTIFICATE,
                "/none/ca.pem",
            ),
        ] {
            let error = read(names).unwrap_err().to_string();
            assert!(
                error.starts_with(name) && error.contains(remedy),
                "{names:?}: {error}"
            );
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
