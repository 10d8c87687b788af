//! Requests about a function that are no calls of it: why can it be called or not (C-3.11), and end that call
//! (C-3.10).
//!
//! They count to no limit of calls, so that they get through while a gateway is full; they have one of their own.

use bytes::Bytes;
use kruntimes_proto::ids::InvocationId;
use tokio::time::Instant;

use crate::{
    admit::{Admission, Admitted},
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

/// How many questions of one kind may be with owners at once; each waits some seconds at most.
const AT_ONCE: usize = 64;
/// How many of them about one namespace: its owners may be slow, and others have a right to theirs.
const PER_NAMESPACE: usize = 16;

/// What questions need besides the parts that calls use.
#[derive(Debug)]
pub struct Questions {
    /// A room of their own: whoever wants a call to end does not wait for those who want to know.
    cancels: Admission,
    explains: Admission,
    age: RouteAge,
}

// === impl Questions ===

impl Questions {
    /// The pages tell how old the routes are.
    #[must_use]
    pub fn new(age: RouteAge) -> Self {
        Self {
            cancels: Admission::new(AT_ONCE, PER_NAMESPACE),
            explains: Admission::new(AT_ONCE, PER_NAMESPACE),
            age,
        }
    }
}

fn turn(room: &Admission, namespace: &str) -> Result<Admitted, InvokeError> {
    room.admit(namespace)
        .map_err(|_| InvokeError::Overloaded("questions to owners"))
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
        let entry = self.permitted(subject, UPDATE, Instant::now(), timing).await?;
        let route = entry.route.as_ref().ok_or(InvokeError::NoSuchInvocation)?;
        let _turn = turn(&self.questions.cancels, &entry.key.namespace)?;
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
        let entry = self.permitted(subject, GET, Instant::now(), timing).await?;
        let said = match &entry.route {
            Some(route) => {
                let _turn = turn(&self.questions.explains, &entry.key.namespace)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// C-3.10: slow owners of one namespace keep nobody else waiting, and no wish to know keeps a call running.
    #[test]
    fn questions_of_one_kind_and_namespace_leave_room_for_others() {
        let questions = Questions::default();
        let slow: Vec<_> = (0..PER_NAMESPACE)
            .map(|_| turn(&questions.explains, "slow").expect("there is room"))
            .collect();
        assert!(turn(&questions.explains, "slow").is_err());
        assert!(turn(&questions.explains, "other").is_ok());
        assert!(turn(&questions.cancels, "slow").is_ok());
        drop(slow);
        assert!(turn(&questions.explains, "slow").is_ok());
    }
}
