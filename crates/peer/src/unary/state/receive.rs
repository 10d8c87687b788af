//! What the other side sends.

use bytes::{Buf as _, BytesMut};

use super::{Block, COPIED, OWED, Piece, State};
use crate::unary::{
    frame::{self, Code, HEAD_BYTES, Head, Kind, Violation, flag, setting},
    stream::{Broken, Stream, Wrong},
};

// === impl State ===

impl State {
    /// Takes the whole frames that `input` begins with, and leaves room for the rest of the next.
    ///
    /// # Errors
    /// When the connection cannot go on; then it has ended.
    pub(crate) fn receive(&mut self, input: &mut BytesMut) -> Result<(), Violation> {
        let received = self.frames(input);
        if let Err(violation) = &received {
            self.leave(violation.code);
            self.end(&violation.to_string());
        }
        received
    }

    /// Where the rest of a large piece can be read into, and how much that is. What was read is to be given back.
    pub(crate) fn lend(&mut self) -> Option<(BytesMut, usize)> {
        let Piece { head, left } = self.piece.filter(|piece| piece.left > COPIED)?;
        let stream = self.running_call(head.stream)?;
        Some((stream.lend(left), left))
    }

    /// So many bytes of the piece were read.
    pub(crate) fn give_back(&mut self, body: BytesMut, bytes: usize) {
        let Some(piece) = &mut self.piece else { return };
        piece.left -= bytes.min(piece.left);
        let Piece { head, left } = *piece;
        // Its caller may have gone meanwhile.
        if let Some(stream) = self.running_call(head.stream) {
            stream.give_back(body);
        }
        if left == 0 {
            self.piece = None;
            self.taken(head);
        }
    }

    fn frames(&mut self, input: &mut BytesMut) -> Result<(), Violation> {
        if !self.continue_piece(input) {
            return Ok(());
        }
        while let Some(head) = Head::read(input) {
            if head.length > self.settings.frame as usize {
                return Err(Code::FRAME_SIZE.because("a frame that is too large"));
            }
            let missing = (HEAD_BYTES + head.length).saturating_sub(input.len());
            // A large piece of a body is not to be gathered first and copied then.
            let in_parts = head.kind == Kind::Data && head.length > COPIED && !head.is(flag::PADDED);
            if missing > 0 && !in_parts {
                input.reserve(missing);
                break;
            }
            input.advance(HEAD_BYTES);
            if !self.theirs.begun && (head.kind != Kind::Settings || head.is(flag::ACK)) {
                return Err(Code::PROTOCOL.because("it does not begin as HTTP/2 does"));
            }
            let open = self.block.as_ref().map(|block| block.stream);
            if (open.is_some() || head.kind == Kind::Continuation)
                && (head.kind, Some(head.stream)) != (Kind::Continuation, open)
            {
                return Err(Code::PROTOCOL.because("a list of headers that is interrupted"));
            }
            if missing > 0 {
                self.expect(head, head.length)?;
                self.piece = Some(Piece {
                    head,
                    left: head.length,
                });
                self.continue_piece(input);
                break;
            }
            if head.kind == Kind::Data {
                let payload = if head.length > COPIED {
                    input.split_to(head.length)
                } else {
                    let copy = BytesMut::from(input.get(..head.length).unwrap_or_default());
                    input.advance(head.length);
                    copy
                };
                self.data(head, payload)?;
            } else {
                // All of it is there.
                self.frame(head, input.get(..head.length).unwrap_or_default())?;
                input.advance(head.length);
            }
            if self.owed > OWED {
                return Err(Code::CALM_DOWN.because("it asks for more than it reads"));
            }
        }
        Ok(())
    }

    fn frame(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        match head.kind {
            Kind::Headers => self.headers(head, payload),
            Kind::Continuation => self.continuation(head, payload),
            Kind::Reset => self.was_reset(head, payload),
            Kind::Settings => self.settings(head, payload),
            Kind::Ping => self.pinged(head, payload),
            Kind::GoAway => self.goes_away(head, payload),
            Kind::WindowUpdate => self.window_update(head, payload),
            Kind::Push => Err(Code::PROTOCOL.because("a push, which was declined")),
            Kind::Data | Kind::Priority | Kind::Other => Ok(()),
        }
    }

    /// Takes more of a piece that has begun; `false` while its end has not come.
    fn continue_piece(&mut self, input: &mut BytesMut) -> bool {
        let Some(Piece { head, left }) = self.piece else {
            return true;
        };
        let now = left.min(input.len());
        let part = input.get(..now).unwrap_or_default();
        if let Some(stream) = self.running_call(head.stream) {
            stream.append(part);
        }
        input.advance(now);
        self.piece = (now < left).then_some(Piece {
            head,
            left: left - now,
        });
        if self.piece.is_none() {
            self.taken(head);
        }
        self.piece.is_none()
    }

    fn data(&mut self, head: Head, payload: BytesMut) -> Result<(), Violation> {
        let payload = head.unpadded(payload)?.freeze();
        self.expect(head, payload.len())?;
        if let Some(stream) = self.stream(head)? {
            stream.add(payload);
        }
        self.taken(head);
        Ok(())
    }

    /// A frame of a body has begun, with so many bytes of it.
    fn expect(&mut self, head: Head, bytes: usize) -> Result<(), Violation> {
        if let Some(stream) = self.stream(head)?
            && let Err(wrong) = stream.expects(bytes)
        {
            self.fail(head.stream, wrong);
        }
        Ok(())
    }

    /// A frame of a body was taken: windows are given back, whoever wanted it.
    fn taken(&mut self, head: Head) {
        // At most as long as a frame may be.
        let bytes = u32::try_from(head.length).unwrap_or(u32::MAX);
        self.kept = self.kept.saturating_add(bytes);
        if self.kept >= self.settings.connection_window / 2 {
            let back = std::mem::take(&mut self.kept);
            self.put(Kind::WindowUpdate, 0, 0, &back.to_be_bytes());
        }
        if head.is(flag::END_STREAM) {
            return self.finish(head.stream);
        }
        let whole = self.settings.stream_window;
        let Some(stream) = self.running_call(head.stream) else {
            return;
        };
        let back = stream.taken(bytes, whole);
        if back > 0 {
            self.put(Kind::WindowUpdate, 0, head.stream, &back.to_be_bytes());
        }
    }

    fn headers(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        if head.stream == 0 {
            return Err(Code::PROTOCOL.because("headers of no call"));
        }
        let ends = head.is(flag::END_STREAM);
        let mut rest = payload;
        let mut unpadded = None;
        if head.is(flag::PADDED) {
            rest = unpadded.insert(head.unpadded(payload.into())?);
        }
        if head.is(flag::PRIORITY) {
            let short = Code::FRAME_SIZE.because("headers without their priority");
            rest = rest.get(5..).ok_or(short)?;
        }
        if head.is(flag::END_HEADERS) {
            return self.list(head.stream, ends, rest);
        }
        self.block = Some(Block {
            stream: head.stream,
            ends,
            bytes: rest.into(),
        });
        Ok(())
    }

    fn continuation(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        let Some(mut block) = self.block.take() else {
            return Ok(());
        };
        // Nothing at all would cost time and never end.
        if payload.is_empty() || block.bytes.len() + payload.len() > self.settings.headers as usize {
            return Err(Code::CALM_DOWN.because("a list of headers without an end"));
        }
        block.bytes.extend_from_slice(payload);
        if head.is(flag::END_HEADERS) {
            return self.list(block.stream, block.ends, &block.bytes);
        }
        self.block = Some(block);
        Ok(())
    }

    fn list(&mut self, id: u32, ends: bool, block: &[u8]) -> Result<(), Violation> {
        // It is read even if nobody wants it: the tables of both sides must be the same.
        let list = self.decoder.read(block, self.settings.headers as usize)?;
        let head = Head {
            length: 0,
            kind: Kind::Headers,
            flags: 0,
            stream: id,
        };
        let Some(stream) = self.stream(head)? else {
            return Ok(());
        };
        match stream.headers(list, ends) {
            Err(wrong) => self.fail(id, wrong),
            Ok(true) => self.finish(id),
            Ok(false) => {}
        }
        Ok(())
    }

    fn was_reset(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        let code = Code(four(payload)?);
        if let Some(stream) = self.stream(head)? {
            stream.end(Err(Broken::Reset(code)));
            self.running -= 1;
        }
        Ok(())
    }

    fn settings(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        if head.stream != 0 {
            return Err(Code::PROTOCOL.because("settings of a call"));
        }
        let pairs = payload.chunks_exact(6);
        if !pairs.remainder().is_empty() || head.is(flag::ACK) && !payload.is_empty() {
            return Err(Code::FRAME_SIZE.because("settings of a wrong length"));
        }
        if head.is(flag::ACK) {
            return Ok(());
        }
        if !self.theirs.begun {
            // Who says nothing of it takes any number (RFC 9113, section 6.5.2).
            (self.theirs.begun, self.theirs.streams) = (true, usize::MAX);
        }
        for mut pair in pairs {
            let (name, value) = (pair.get_u16(), pair.get_u32());
            self.setting(name, value)?;
        }
        self.owe(Kind::Settings, flag::ACK, 0, &[]);
        Ok(())
    }

    fn setting(&mut self, name: u16, value: u32) -> Result<(), Violation> {
        match name {
            setting::TABLE => self.encoder.limit(value as usize),
            setting::PUSH if value != 0 => {
                return Err(Code::PROTOCOL.because("a server that wants pushes"));
            }
            setting::STREAMS => self.theirs.streams = value as usize,
            setting::WINDOW if value > frame::LARGEST_WINDOW => {
                return Err(Code::FLOW_CONTROL.because("a window that is too large"));
            }
            setting::WINDOW => {
                let more = i64::from(value) - i64::from(self.theirs.window);
                self.theirs.window = value;
                for stream in self.streams.values_mut() {
                    stream.window += more;
                }
            }
            setting::FRAME if !(0x4000..=0x00ff_ffff).contains(&value) => {
                return Err(Code::PROTOCOL.because("a size of frames that does not exist"));
            }
            setting::FRAME => self.theirs.frame = value as usize,
            _ => {}
        }
        Ok(())
    }

    fn pinged(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        if head.stream != 0 {
            return Err(Code::PROTOCOL.because("a ping of a call"));
        }
        if payload.len() != 8 {
            return Err(Code::FRAME_SIZE.because("a ping of a wrong length"));
        }
        if head.is(flag::ACK) {
            self.ponged = true;
        } else {
            self.owe(Kind::Ping, flag::ACK, 0, payload);
        }
        Ok(())
    }

    fn goes_away(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        let numbers = frame::number(payload).zip(payload.get(4..).and_then(frame::number));
        let short = Code::FRAME_SIZE.because("a goodbye of a wrong length");
        let (last, code) = numbers.ok_or(short)?;
        if head.stream != 0 {
            return Err(Code::PROTOCOL.because("a goodbye of a call"));
        }
        let (last, code) = (last & frame::LARGEST_WINDOW, Code(code));
        self.over
            .get_or_insert_with(|| format!("the other side ends it ({code})"));
        let late = self.streams.range_mut(last.saturating_add(1)..);
        for (_, stream) in late.filter(|(_, stream)| stream.runs()) {
            stream.end(Err(Broken::GoAway(code)));
            self.running -= 1;
        }
        Ok(())
    }

    fn window_update(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        let more = i64::from(four(payload)? & frame::LARGEST_WINDOW);
        let most = i64::from(frame::LARGEST_WINDOW);
        if head.stream == 0 {
            if more == 0 {
                return Err(Code::PROTOCOL.because("a window that grows by nothing"));
            }
            self.window += more;
            return if self.window > most {
                Err(Code::FLOW_CONTROL.because("a window that is too large"))
            } else {
                Ok(())
            };
        }
        let Some(stream) = self.stream(head)? else {
            return Ok(());
        };
        stream.window += more;
        if more == 0 {
            self.fail(
                head.stream,
                Wrong::new(Code::PROTOCOL, "a window that grows by nothing"),
            );
        } else if stream.window > most {
            self.fail(
                head.stream,
                Wrong::new(Code::FLOW_CONTROL, "a window that is too large"),
            );
        }
        Ok(())
    }

    /// The running call that a frame is about. Frames for those that have ended may still be on their way.
    fn stream(&mut self, head: Head) -> Result<Option<&mut Stream>, Violation> {
        if head.stream == 0 || head.stream.is_multiple_of(2) || head.stream >= self.next {
            return Err(Code::PROTOCOL.because("a frame of a call that nobody made"));
        }
        Ok(self.running_call(head.stream))
    }

    fn running_call(&mut self, id: u32) -> Option<&mut Stream> {
        self.streams.get_mut(&id).filter(|stream| stream.runs())
    }

    fn finish(&mut self, id: u32) {
        let Some(stream) = self.running_call(id) else {
            return;
        };
        let unsent = stream.unsent() > 0;
        stream.end(Ok(()));
        self.running -= 1;
        if unsent {
            // It has answered without having heard all of it, and is not to wait for the rest.
            self.reset(id, Code::CANCEL);
        }
    }

    fn fail(&mut self, id: u32, wrong: Wrong) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.end(Err(wrong.error));
            self.running -= 1;
            self.reset(id, wrong.code);
        }
    }
}

/// The whole of a payload that is a number.
fn four(payload: &[u8]) -> Result<u32, Violation> {
    match <[u8; 4]>::try_from(payload) {
        Ok(bytes) => Ok(u32::from_be_bytes(bytes)),
        Err(_) => Err(Code::FRAME_SIZE.because("a frame of a wrong length")),
    }
}
