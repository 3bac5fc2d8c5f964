import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;

/**
 * java.net.http.HttpClient. The JVM reads no variable but JAVA_TOOL_OPTIONS, which brings proxy and truststore.
 * It talks with the runner as python/talk.py does.
 */
public class Client {
    static final Duration PATIENCE = Duration.ofSeconds(10);
    static final String ASKED = "{\"ask\": \"hello\"}";

    public static void main(String[] arguments) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            System.out.println(report(line.split("\t")));
        }
    }

    static String report(String[] asked) {
        try {
            var client = HttpClient.newBuilder().connectTimeout(PATIENCE).build();
            var request = HttpRequest.newBuilder(URI.create(asked[1])).timeout(PATIENCE);
            for (int at = 2; at < asked.length; at++) {
                var field = asked[at].split(": ", 2);
                request.header(field[0], field[1]);
            }
            return switch (asked[0]) {
                case "post" -> {
                    request.header("content-type", "application/json").POST(BodyPublishers.ofString(ASKED));
                    yield call(client, request.build());
                }
                case "stream" -> stream(client, request.build());
                case "twice" -> {
                    call(client, request.build());
                    yield call(client, request.build());
                }
                default -> call(client, request.build());
            };
        } catch (Exception error) {
            var told = new ArrayList<String>();
            for (Throwable at = error; at != null; at = at.getCause()) {
                told.add(at.toString());
            }
            return "{\"failure\": " + json(String.join(" < ", told)) + "}";
        }
    }

    static String call(HttpClient client, HttpRequest request) throws Exception {
        var response = client.send(request, BodyHandlers.ofString());
        return saw(response, response.body(), List.of());
    }

    static String stream(HttpClient client, HttpRequest request) throws Exception {
        long began = System.nanoTime();
        var response = client.send(request, BodyHandlers.ofLines());
        var times = new ArrayList<Long>();
        var lines = new ArrayList<String>();
        response.body().forEach(line -> {
            if (line.startsWith("data:")) {
                times.add((System.nanoTime() - began) / 1_000_000);
            }
            lines.add(line);
        });
        return saw(response, String.join("\n", lines), times);
    }

    static String saw(HttpResponse<?> response, String body, List<Long> times) {
        String version = response.version() == HttpClient.Version.HTTP_2 ? "2" : "1.1";
        return String.format("{\"status\": %d, \"http\": \"%s\", \"body\": %s, \"events_ms\": %s}",
            response.statusCode(), version, json(body), times);
    }

    static String json(String text) {
        var out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\' || c < ' ') {
                out.append(String.format("\\u%04x", (int) c));
            } else {
                out.append(c);
            }
        }
        return out.append('"').toString();
    }
}
