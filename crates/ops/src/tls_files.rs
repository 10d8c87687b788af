//! Which certificate and key are the newest good ones: `tls.crt`, `tls.key` and `ca.crt` of a
//! mounted Secret, polled by content (C-3.12).
//!
//! A pair is published only after the caller's check accepted it, as whatever that check made of
//! it. A bad or half-written pair leaves the last good one in place.

use std::{error::Error, fmt, io, path::PathBuf, sync::Arc};

use tokio::sync::watch;

use crate::{
    certificate,
    drain::Drain,
    files::{self, Contents, Once, WatchedDir},
};

/// What a check says of a pair it refuses. Its text is logged and must not quote the key.
pub type Refusal = Box<dyn Error + Send + Sync>;

/// The three files. Debug prints sizes, never content.
#[derive(Clone, PartialEq, Eq)]
pub struct Pair {
    /// `tls.crt`: the certificate, then its intermediates.
    pub cert_pem: Vec<u8>,
    /// `tls.key`.
    pub key_pem: Vec<u8>,
    /// `ca.crt`, which not every Secret has.
    pub ca_pem: Option<Vec<u8>>,
}

/// A pair that was accepted.
#[derive(Debug, Clone)]
pub struct Accepted<T> {
    /// What the check made of the pair.
    pub value: T,
    /// End of the certificate in seconds since the epoch, if it could be read.
    pub not_after: Option<i64>,
    /// 1 for the first accepted pair, then one more for each.
    pub generation: u64,
}

/// The newest accepted pair; clones share it. Reading is cheap enough for every handshake.
#[derive(Debug)]
pub struct TlsFiles<T> {
    newest: watch::Receiver<Option<Arc<Accepted<T>>>>,
}

/// Starts to poll `dir` and returns after the first reading. `name` is how the log calls this pair.
///
/// `check` turns a pair into what the caller serves with, or says why it cannot.
pub fn watch<T, C>(name: &'static str, dir: impl Into<PathBuf>, drain: &Drain, check: C) -> TlsFiles<T>
where
    T: Send + Sync + 'static,
    C: FnMut(&Pair) -> Result<T, Refusal> + Send + 'static,
{
    let dir = WatchedDir::new(dir, &NAMES);
    let (mut publisher, newest) = Publisher::new(name, check);
    publisher.see(dir.read());
    drain.spawn_background(name, files::poll(dir, move |read| publisher.see(read)));
    TlsFiles { newest }
}

// === impl TlsFiles ===

impl<T> Clone for TlsFiles<T> {
    fn clone(&self) -> Self {
        Self {
            newest: self.newest.clone(),
        }
    }
}

impl<T> TlsFiles<T> {
    /// The newest accepted pair, or `None` while there never was one.
    #[must_use]
    pub fn newest(&self) -> Option<Arc<Accepted<T>>> {
        self.newest.borrow().clone()
    }

    /// Waits for the first accepted pair; `None` if polling ended before.
    pub async fn first(&mut self) -> Option<Arc<Accepted<T>>> {
        self.newest
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|newest| newest.clone())
    }

    /// Waits for a pair newer than the last one waited for; `None` if polling ended.
    pub async fn next(&mut self) -> Option<Arc<Accepted<T>>> {
        self.newest.changed().await.ok()?;
        self.newest.borrow_and_update().clone()
    }
}

// === impl Pair ===

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair")
            .field("cert_bytes", &self.cert_pem.len())
            .field("key_bytes", &self.key_pem.len())
            .field("ca_bytes", &self.ca_pem.as_ref().map(Vec::len))
            .finish()
    }
}

const CERT: &str = "tls.crt";
const KEY: &str = "tls.key";
const CA: &str = "ca.crt";
static NAMES: [&str; 3] = [CERT, KEY, CA];

/// Decides what is published; the only state is what was seen last.
struct Publisher<T, C> {
    name: &'static str,
    check: C,
    seen: Option<Pair>,
    generation: u64,
    complaint: Once,
    newest: watch::Sender<Option<Arc<Accepted<T>>>>,
}

type Newest<T> = watch::Receiver<Option<Arc<Accepted<T>>>>;

// === impl Publisher ===

impl<T, C> Publisher<T, C>
where
    C: FnMut(&Pair) -> Result<T, Refusal>,
{
    fn new(name: &'static str, check: C) -> (Self, Newest<T>) {
        let (newest, receiver) = watch::channel(None);
        let publisher = Self {
            name,
            check,
            seen: None,
            generation: 0,
            complaint: Once::default(),
            newest,
        };
        (publisher, receiver)
    }

    fn see(&mut self, read: io::Result<Contents>) {
        let name = self.name;
        let pair = match read.map_err(|error| error.to_string()).and_then(pair_of) {
            Ok(pair) => pair,
            Err(error) => {
                // What is gone and comes back is looked at again.
                self.seen = None;
                let message = format!("{name}: no certificate pair; the last good one stays");
                self.complaint.warn(&message, &error);
                return;
            }
        };
        if self.seen.as_ref() == Some(&pair) {
            return;
        }
        match (self.check)(&pair) {
            Ok(value) => {
                self.complaint.clear();
                self.generation += 1;
                let not_after = certificate::not_after_of_pem(&pair.cert_pem);
                tracing::info!(
                    generation = self.generation,
                    not_after_seconds = not_after,
                    "{name}: certificate pair in use"
                );
                self.newest.send_replace(Some(Arc::new(Accepted {
                    value,
                    not_after,
                    generation: self.generation,
                })));
            }
            Err(error) => {
                let message = format!("{name}: certificate pair refused; the last good one stays");
                self.complaint.warn(&message, &error.to_string());
            }
        }
        self.seen = Some(pair);
    }
}

fn pair_of(contents: Contents) -> Result<Pair, String> {
    let file = |name| {
        contents
            .get(name)
            .filter(|bytes| !bytes.is_empty())
            .map(<[u8]>::to_vec)
    };
    let need = |name| file(name).ok_or_else(|| format!("{name} is absent or empty"));
    Ok(Pair {
        cert_pem: need(CERT)?,
        key_pem: need(KEY)?,
        ca_pem: file(CA),
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use rcgen::{CertificateParams, KeyPair};
    use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};

    use super::*;

    struct Made {
        cert: String,
        key: String,
    }

    fn make(name: &str) -> Made {
        let key = KeyPair::generate().expect("a key");
        let certificate = CertificateParams::new(vec![name.to_owned()])
            .expect("a name")
            .self_signed(&key)
            .expect("a certificate");
        Made {
            cert: certificate.pem(),
            key: key.serialize_pem(),
        }
    }

    /// Accepts a pair whose key belongs to its certificate, and returns the certificate.
    fn check(pair: &Pair) -> Result<Vec<u8>, Refusal> {
        let cert = CertificateDer::from_pem_slice(&pair.cert_pem)?;
        let key = PrivateKeyDer::from_pem_slice(&pair.key_pem)?;
        let key = KeyPair::try_from(&key)?;
        let public = rcgen::PublicKeyData::der_bytes(&key).to_vec();
        if !cert.windows(public.len()).any(|part| part == public) {
            return Err("the key is of another certificate".into());
        }
        Ok(cert.to_vec())
    }

    fn put(dir: &Path, cert: &str, key: &str) {
        fs::write(dir.join(CERT), cert).expect("write");
        fs::write(dir.join(KEY), key).expect("write");
    }

    fn der(made: &Made) -> Vec<u8> {
        CertificateDer::from_pem_slice(made.cert.as_bytes())
            .expect("pem")
            .to_vec()
    }

    /// C-3.12
    #[test]
    fn a_bad_pair_keeps_the_old_one() {
        let temp = tempfile::tempdir().expect("a directory");
        let dir = WatchedDir::new(temp.path(), &NAMES);
        let (mut publisher, newest) = Publisher::new("test", check);
        publisher.see(dir.read());
        assert!(newest.borrow().is_none(), "the directory is empty");

        let (one, two) = (make("one.test"), make("two.test"));
        put(temp.path(), &one.cert, &one.key);
        publisher.see(dir.read());
        let serving = || newest.borrow().clone().expect("a pair");
        assert_eq!(serving().value, der(&one));
        assert_eq!(serving().generation, 1);
        assert!(serving().not_after.is_some());

        // Half written: new certificate, old key; then cut files; then none.
        for (cert, key) in [
            (two.cert.as_str(), one.key.as_str()),
            (&two.cert[..two.cert.len() / 2], &two.key),
            (&two.cert, &two.key[..40]),
            ("", &two.key),
        ] {
            put(temp.path(), cert, key);
            publisher.see(dir.read());
            assert_eq!(serving().value, der(&one));
        }
        fs::remove_file(temp.path().join(KEY)).expect("remove");
        publisher.see(dir.read());
        assert_eq!(serving().generation, 1);

        put(temp.path(), &two.cert, &two.key);
        publisher.see(dir.read());
        assert_eq!(serving().value, der(&two));
        assert_eq!(serving().generation, 2);
    }

    #[test]
    fn an_unchanged_pair_is_not_checked_again() {
        let temp = tempfile::tempdir().expect("a directory");
        let made = make("one.test");
        put(temp.path(), &made.cert, &made.key);
        let dir = WatchedDir::new(temp.path(), &NAMES);
        let mut checks = 0;
        let (mut publisher, _newest) = Publisher::new("test", |_: &Pair| {
            checks += 1;
            Ok(())
        });
        for _ in 0..3 {
            publisher.see(dir.read());
        }
        drop(publisher);
        assert_eq!(checks, 1);
    }

    /// C-3.12
    #[tokio::test(start_paused = true)]
    async fn a_swapped_secret_volume_is_noticed() {
        let temp = tempfile::tempdir().expect("a directory");
        let root = temp.path();
        let (one, two) = (make("one.test"), make("two.test"));
        for (version, made) in [("..1", &one), ("..2", &two)] {
            fs::create_dir(root.join(version)).expect("mkdir");
            put(&root.join(version), &made.cert, &made.key);
        }
        symlink("..1", root.join("..data")).expect("link");
        for name in [CERT, KEY] {
            symlink(format!("..data/{name}"), root.join(name)).expect("link");
        }
        let drain = Drain::new();
        let mut files = watch("test", root, &drain, check);
        assert_eq!(files.first().await.expect("a pair").value, der(&one));
        symlink("..2", root.join("..next")).expect("link");
        fs::rename(root.join("..next"), root.join("..data")).expect("swap");
        assert_eq!(files.next().await.expect("a pair").value, der(&two));
    }

    #[test]
    fn debug_prints_no_key() {
        let pair = Pair {
            cert_pem: b"certificate".to_vec(),
            key_pem: b"secret".to_vec(),
            ca_pem: None,
        };
        let text = format!("{pair:?}");
        assert!(!text.contains("secret") && !text.contains("115"), "{text}");
    }
}
