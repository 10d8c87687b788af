/* The process that holds a Pod's namespaces open: it reaps what is re-parented to it and sleeps. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int signal_number) {
  (void)signal_number;
  _exit(0);
}

static void reap(int signal_number) {
  (void)signal_number;
  while (waitpid(-1, NULL, WNOHANG) > 0) {
  }
}

int main(void) {
  struct sigaction on_leave = {.sa_handler = leave};
  struct sigaction on_child = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
  if (sigaction(SIGINT, &on_leave, NULL) || sigaction(SIGTERM, &on_leave, NULL) ||
      sigaction(SIGCHLD, &on_child, NULL)) {
    return EXIT_FAILURE;
  }
  for (;;) {
    pause();
  }
}
