//! One channel per owning process: made on demand, tried before use after a rest, gone with its owner.
//!
//! A channel never connects again by itself. Whether a call was sent is therefore always known here.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use kruntimes_peer::{Dialer, UnaryChannel};
use kruntimes_proto::executor::{FunctionStatusRequest, function_runtime_client::FunctionRuntimeClient};
use tokio::time::{Instant, timeout, timeout_at};

use crate::{hop::HopError, routes::Owner};

/// How long connecting may take, all steps together. Pods answer in milliseconds or not at all.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(1);
/// A channel that rested longer is tried before it carries a call (contract 4).
pub const RESTED: Duration = Duration::from_secs(5);
/// How long that may take.
const TRY_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection that is older carries no new calls, so that both sides judge each other's certificates again.
/// Owners end connections after twice that time ([`kruntimes_peer::accept::MAX_AGE`]).
pub const MAX_AGE: Duration = Duration::from_secs(10 * 60);
/// After a failed dial others fail at once for this long, so that they do not queue up for the same end.
const FAILED: Duration = Duration::from_millis(500);

/// All channels of this process.
#[derive(Debug)]
pub struct Channels {
    dialer: Dialer,
    rested: Duration,
    max_age: Duration,
    /// Grows when the gateway's own certificate changes.
    identity: AtomicU64,
    slots: Mutex<HashMap<Owner, Arc<Slot>>>,
}

/// A channel that works as far as is known, and counts as used until this drops.
#[derive(Debug)]
pub struct Lease {
    slot: Arc<Slot>,
    open: Arc<Open>,
}

#[derive(Debug, Default)]
struct Slot {
    open: ArcSwapOption<Open>,
    /// Held while dialling or trying; calls on a channel in use do not touch it.
    gate: tokio::sync::Mutex<Option<Failed>>,
}

#[derive(Debug)]
struct Failed {
    at: Instant,
    why: String,
}

#[derive(Debug)]
struct Open {
    channel: UnaryChannel,
    made: Instant,
    identity: u64,
    in_use: AtomicUsize,
    rested_since: Mutex<Instant>,
    /// A call on it met silence: it is tried before the next one, however short it rested.
    doubted: AtomicBool,
}

// === impl Channels ===

impl Channels {
    /// No channels yet. One that carried no call for longer than `rested` is tried before its next; one older than
    /// `max_age` carries no new one.
    #[must_use]
    pub fn new(dialer: Dialer, rested: Duration, max_age: Duration) -> Self {
        Self {
            dialer,
            rested,
            max_age,
            identity: AtomicU64::new(0),
            slots: Mutex::default(),
        }
    }

    /// A channel to `owner`, at the latest at `deadline`, and the time then; it is `now` now.
    ///
    /// # Errors
    /// Says why there is none; nothing of a call was sent.
    pub async fn get(
        &self,
        owner: &Owner,
        now: Instant,
        deadline: Instant,
    ) -> Result<(Lease, Instant), HopError> {
        let slot = self.slot(owner);
        if let Some(lease) = self.fresh(&slot, now) {
            return Ok((lease, now));
        }
        // Boxed: it is rare, and calls that find a channel are not to hold the room for making one.
        match Box::pin(timeout_at(deadline, self.make(owner, slot))).await {
            Ok(Ok(lease)) => Ok((lease, Instant::now())),
            Ok(Err(why)) => Err(HopError::NotSent(why)),
            Err(_) => Err(HopError::TooLate),
        }
    }

    /// Forgets the channels of all owners but `live`. Calls that run on them go on.
    pub fn retain(&self, live: &HashSet<Owner>) {
        self.lock().retain(|owner, _| live.contains(owner));
    }

    /// The gateway has another certificate: connections that were made with the one before carry no new calls, so
    /// that none is left when owners stop to trust it.
    pub fn renew(&self) {
        self.identity.fetch_add(1, Ordering::Relaxed);
    }

    /// How many owners have a channel, or had one.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    async fn make(&self, owner: &Owner, slot: Arc<Slot>) -> Result<Lease, String> {
        let mut failed = slot.gate.lock().await;
        // Somebody else may have made it meanwhile.
        if let Some(lease) = self.fresh(&slot, Instant::now()) {
            return Ok(lease);
        }
        let identity = self.identity.load(Ordering::Relaxed);
        if let Some(open) = slot.open.load_full() {
            // Calls that run on one that is out of date keep it until they end.
            let dated = self.is_out_of_date(&open, Instant::now());
            // No lease meanwhile: others would take a channel in use for one that works, and whoever gives up
            // waiting would leave it looking as if it had just carried a call.
            if !dated && is_alive(open.channel.clone()).await {
                open.doubted.store(false, Ordering::Relaxed);
                return Ok(Lease::new(&slot, &open));
            }
            slot.open.store(None);
        }
        if let Some(before) = &*failed
            && before.at.elapsed() < FAILED
        {
            return Err(before.why.clone());
        }
        match self.dialer.dial(owner.address, &owner.key).await {
            Ok(channel) => {
                *failed = None;
                let open = Arc::new(Open::new(channel, identity));
                slot.open.store(Some(Arc::clone(&open)));
                Ok(Lease::new(&slot, &open))
            }
            Err(error) => {
                let why = error.to_string();
                tracing::warn!(address = %owner.address, error = why, "an owner cannot be reached");
                *failed = Some(Failed {
                    at: Instant::now(),
                    why: why.clone(),
                });
                Err(why)
            }
        }
    }

    /// A channel that needs no trying.
    fn fresh(&self, slot: &Arc<Slot>, now: Instant) -> Option<Lease> {
        let open = slot.open.load_full()?;
        let tired = open.channel.is_over()
            || open.doubted.load(Ordering::Relaxed)
            || self.is_out_of_date(&open, now)
            || open.has_rested(self.rested, now);
        (!tired).then(|| Lease::new(slot, &open))
    }

    fn is_out_of_date(&self, open: &Open, now: Instant) -> bool {
        open.identity != self.identity.load(Ordering::Relaxed)
            || now.saturating_duration_since(open.made) > self.max_age
    }

    fn slot(&self, owner: &Owner) -> Arc<Slot> {
        let mut slots = self.lock();
        Arc::clone(slots.entry(*owner).or_default())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Owner, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether anything answers on this channel. The question is about no function and carries nothing of a
/// caller; whatever comes back shows that connection and process live.
async fn is_alive(channel: UnaryChannel) -> bool {
    let mut client = FunctionRuntimeClient::new(channel);
    match timeout(
        TRY_TIMEOUT,
        client.function_status(FunctionStatusRequest::default()),
    )
    .await
    {
        // A status that was made up on this side has a source; one that came over the wire has none.
        Ok(Err(status)) => std::error::Error::source(&status).is_none(),
        Ok(Ok(_)) => true,
        Err(_) => false,
    }
}

// === impl Lease ===

impl Lease {
    fn new(slot: &Arc<Slot>, open: &Arc<Open>) -> Self {
        open.in_use.fetch_add(1, Ordering::Relaxed);
        Self {
            slot: Arc::clone(slot),
            open: Arc::clone(open),
        }
    }

    /// The channel.
    #[must_use]
    pub fn channel(&self) -> UnaryChannel {
        self.open.channel.clone()
    }

    /// Nothing came back on the channel, not even that the deadline passed: it may lead nowhere.
    pub fn doubt(&self) {
        self.open.doubted.store(true, Ordering::Relaxed);
    }

    /// The channel turned out to be over: the next [`Channels::get`] makes a new one.
    pub fn discard(self) {
        let same = |held: &Option<Arc<Open>>| held.as_ref().is_some_and(|held| Arc::ptr_eq(held, &self.open));
        self.slot
            .open
            .rcu(|held| if same(held) { None } else { held.clone() });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Who is not the last leaves no rest. Of two that leave at once neither may see itself as the last; then the
        // rest seems longer than it is, and the channel is tried once more than needed.
        if self.open.in_use.load(Ordering::Relaxed) == 1 {
            *self
                .open
                .rested_since
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
        self.open.in_use.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl Open ===

impl Open {
    fn new(channel: UnaryChannel, identity: u64) -> Self {
        Self {
            channel,
            made: Instant::now(),
            identity,
            in_use: AtomicUsize::new(0),
            rested_since: Mutex::new(Instant::now()),
            doubted: AtomicBool::new(false),
        }
    }

    fn has_rested(&self, enough: Duration, now: Instant) -> bool {
        if self.in_use.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let since = self.rested_since.lock().unwrap_or_else(PoisonError::into_inner);
        now.saturating_duration_since(*since) > enough
    }
}
