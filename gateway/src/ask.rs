//! Requests about a function that are no calls of it: why can it be called or not (C-3.11), and end that call
//! (C-3.10).
//!
//! They count to no limit of calls, so that they get through while a gateway is full; they have one of their own.

use bytes::Bytes;
use kruntimes_proto::ids::InvocationId;
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    error::InvokeError,
    explain,
    hop::Ask,
    invoke::{Authorize, GET, Invoke},
    reply::Timing,
    request::Subject,
    routes::{Routes, watch::RouteAge},
};

/// What ending somebody's call needs (C-3.10).
pub const UPDATE: &str = "update";

/// How many questions may be with owners at once; each waits some seconds at most.
const AT_ONCE: usize = 64;

/// What questions need besides the parts that calls use.
#[derive(Debug)]
pub struct Questions {
    turns: Semaphore,
    age: RouteAge,
}

// === impl Questions ===

impl Questions {
    /// The pages tell how old the routes are.
    #[must_use]
    pub fn new(age: RouteAge) -> Self {
        Self {
            turns: Semaphore::new(AT_ONCE),
            age,
        }
    }

    fn turn(&self) -> Result<tokio::sync::SemaphorePermit<'_>, InvokeError> {
        self.turns
            .try_acquire()
            .map_err(|_| InvokeError::Overloaded("questions to owners"))
    }
}

impl Default for Questions {
    fn default() -> Self {
        Self::new(RouteAge::default())
    }
}

impl<R: Routes, A: Authorize, H: Ask> Invoke<R, A, H> {
    /// Ends the call with this id; its caller gets 499 `Cancelled`. A Run that takes no more calls may still run
    /// one, so its state does not matter here.
    ///
    /// # Errors
    /// 404 when no such call runs.
    pub async fn cancel(
        &self,
        subject: &Subject,
        invocation: &InvocationId,
        timing: &mut Timing,
    ) -> Result<(), InvokeError> {
        let entry = self.permitted(subject, UPDATE, timing).await?;
        let route = entry.route.as_ref().ok_or(InvokeError::NoSuchInvocation)?;
        let _turn = self.questions.turn()?;
        let sent = Instant::now();
        let was_running = self.hop.cancel(subject, route, invocation).await;
        timing.hop = Some(sent.elapsed());
        if was_running? {
            Ok(())
        } else {
            Err(InvokeError::NoSuchInvocation)
        }
    }

    /// One page of JSON: whether the function can be called, and why not; of the owner what it says, if there is
    /// one that answers.
    ///
    /// # Errors
    /// Those of a call before it is known whether the function is ready.
    pub async fn explain(&self, subject: &Subject, timing: &mut Timing) -> Result<Bytes, InvokeError> {
        let entry = self.permitted(subject, GET, timing).await?;
        let said = match &entry.route {
            Some(route) => {
                let _turn = self.questions.turn()?;
                let sent = Instant::now();
                let said = self.hop.explain(subject, route).await;
                timing.hop = Some(sent.elapsed());
                Some((route, said))
            }
            None => None,
        };
        Ok(explain::page(&entry, self.questions.age.get(), said.as_ref()))
    }
}
